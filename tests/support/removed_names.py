"""A plugin of pytest, `-p removed_names`: transformers without the names that 5.24 deprecates and 5.40 removes.

It has to be loaded before any model file of transformers is imported, because their decorators are applied then.
"""

from __future__ import annotations

import functools

from transformers.utils import deprecation, generic


REMOVED = ("past_key_values", "cache_params")


def without_old_name(old_name, *args, **kwargs):
    """In place of `deprecate_kwarg`: a decorator under which a removed argument is an error, and others as before."""
    if old_name not in REMOVED:
        return deprecate_kwarg(old_name, *args, **kwargs)

    def decorate(function):
        @functools.wraps(function)
        def call(*given, **named):
            if old_name in named:
                raise TypeError(f"{function.__qualname__}() got an unexpected keyword argument '{old_name}'")
            return function(*given, **named)

        return call

    return decorate


deprecate_kwarg = deprecation.deprecate_kwarg
deprecation.deprecate_kwarg = without_old_name
for name in REMOVED:
    delattr(generic.ModelOutput, name)
generic.ModelOutput._replace_old_cache_name = lambda self, key: key
generic._rename_kwargs_for_bc = lambda kwargs: None

"""Builds the optional CPU kernels of csrc/, once per instruction set; everything else stands in pyproject.toml.

Without a C compiler, or with one that does not know the vector extensions of GCC and clang, the installation goes on
and torch computes. `HF_LINEAR_ATTENTION_REQUIRE_KERNELS=1` turns that into an error.
"""

import os
import platform
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext


# No -ffast-math: linked into a library, it makes the whole process flush denormals to 0.
FLAGS = [
    "-std=gnu11",
    "-g0",
    "-O3",
    "-ffp-contract=fast",
    "-fvisibility=hidden",
    "-fno-math-errno",
    "-fno-trapping-math",
]
# -Wno-psabi: vectors are passed between inlined functions only.
FLAGS += ["-fassociative-math", "-fno-signed-zeros", "-Wno-psabi"]
INSTRUCTION_SETS = {"base": []}
if platform.machine().lower() in ("x86_64", "amd64"):
    INSTRUCTION_SETS["avx2"] = ["-mavx2", "-mfma", "-mbmi2"]
    # GCC splits loops into vectors of half the width unless told so.
    INSTRUCTION_SETS["avx512"] = [
        *("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma", "-mbmi2", "-mprefer-vector-width=512")
    ]


class BuildKernels(build_ext):
    """Plain libraries for ctypes: no Python ABI in the name, no initialisation function, objects kept apart."""

    def build_extension(self, extension):
        shared, self.build_temp = self.build_temp, str(Path(self.build_temp) / extension.name)
        try:
            super().build_extension(extension)
        finally:
            self.build_temp = shared

    def get_ext_filename(self, fullname):
        return str(Path(*fullname.split("."))) + (".dll" if sys.platform == "win32" else ".so")

    def get_export_symbols(self, extension):
        return []

    def get_libraries(self, extension):
        return extension.libraries  # and not Python's own


class PlatformWheel(bdist_wheel):
    """`py3-none-<platform>`: the libraries serve every Python."""

    def get_tag(self):
        return "py3", "none", super().get_tag()[2]


setup(
    ext_modules=[
        Extension(
            f"hf_linear_attention._kernels_{name}",
            sources=sorted(str(path) for path in Path("csrc").glob("*.c")),
            depends=sorted(str(path) for path in Path("csrc").glob("*.h")),
            extra_compile_args=FLAGS + flags,
            libraries=[] if sys.platform == "win32" else ["m"],
            optional=os.environ.get("HF_LINEAR_ATTENTION_REQUIRE_KERNELS") != "1",
        )
        for name, flags in INSTRUCTION_SETS.items()
    ],
    cmdclass={"build_ext": BuildKernels, "bdist_wheel": PlatformWheel},
)

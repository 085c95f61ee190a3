"""Which evaluation was the best one, and whether the run has stopped getting better."""

from __future__ import annotations

from hf_linear_attention.training.checkpointing import TrainingState
from hf_linear_attention.training.metrics import GREATER_IS_BETTER
from hf_linear_attention.training.recipe import SELECTING, Recipe


class Selection:
    """Compares evaluations by `--metric_for_best_model`, or by the first figure of the task's metric."""

    def __init__(self, recipe: Recipe) -> None:
        name = (recipe.run.metric_for_best_model or SELECTING[recipe.model.task][0]).removeprefix("eval_")
        self.name, self.sign = f"eval_{name}", 1 if GREATER_IS_BETTER[name] else -1
        self.patience = recipe.run.early_stopping_patience

    def note(self, state: TrainingState, figures: dict[str, float]) -> bool:
        """Enter the evaluation of this step into `state`; True if it is the best so far."""
        best = state.best.get("figures")
        if best is not None and not self.sign * figures[self.name] > self.sign * best[self.name]:
            state.evaluations_since_best += 1
            return False
        state.best, state.evaluations_since_best = {"step": state.step, "figures": figures}, 0
        return True

    def is_over(self, state: TrainingState) -> bool:
        """Whether `--early_stopping_patience` evaluations in a row were no better than the best."""
        return self.patience is not None and state.evaluations_since_best >= self.patience

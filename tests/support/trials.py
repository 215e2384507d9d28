"""An Optuna trial without a study, whose repr makes it again."""

from optuna.trial import FixedTrial


class ShownTrial(FixedTrial):
    def __repr__(self):
        return f"__import__('trials').ShownTrial({self.params!r})"

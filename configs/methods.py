"""Methods as presets of factors: a method is a few values of the config, not a code path."""

from __future__ import annotations

from ml_collections import ConfigDict


def _seed(config: ConfigDict) -> None:
    """SEED (arXiv 2607.14777): GRPO plus gated distillation from the policy's own hindsight skills."""
    config.hindsight.source = "self_hindsight"
    config.distill.kind = "gap_nll"
    config.distill.gate = "sig_gap"


def _grpo(config: ConfigDict) -> None:
    """GRPO (arXiv 2402.03300): the same run without analyzer and teacher."""
    config.hindsight.source = "none"
    config.distill.kind = "none"


PRESETS = {"seed": _seed, "grpo": _grpo}


def apply(config: ConfigDict, method: str) -> ConfigDict:
    """Sets the factors of `method` in place and returns the config."""
    if method not in PRESETS:
        raise ValueError(f"method {method!r} is unknown; choose one of {', '.join(sorted(PRESETS))}")
    PRESETS[method](config)
    config.method = method
    return config

"""Settings of the host."""

from __future__ import annotations

import os

from seed_jax.runtime.host import use_every_core
from tests import xla


def test_a_given_number_of_devices_gets_two_threads_each(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", xla.flags(6))
    monkeypatch.setenv("PJRT_NPROC", "5")  # what a user has set stays
    use_every_core(4)
    assert os.environ["PJRT_NPROC"] == "5"
    monkeypatch.delenv("PJRT_NPROC")
    use_every_core(4)
    assert os.environ["PJRT_NPROC"] == "12"

"""Tests run on eight virtual CPU devices. The variables count only if they are set before jax is imported."""

from __future__ import annotations

import os

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ["JAX_PLATFORMS"] = "cpu"

"""Tests of the scheduler also run the admission modes of the load test's baselines, which register when imported."""

from quire.loadtest.studies import baselines  # noqa: F401

"""Let Hypothesis make scenarios and find the shortest one that fails."""

from __future__ import annotations

from typing import TYPE_CHECKING

import hypothesis
from hypothesis import HealthCheck, Phase, given, settings

from .strategies import Requests

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .requests import Scenario
    from .target import Target


def play(
    target: Target, *, seed: int, requests: int, scenarios: int = 100
) -> Iterator[int]:
    """
    Play scenarios until enough requests were sent.

    Args:
        target: The example.
        seed: Decides the first scenarios, the next number the following ones.
        requests: How many requests are enough.
        scenarios: How many of them one seed decides; Hypothesis remembers each.

    Yields:
        Each seed before it is used.

    Raises:
        FindingError: Of the shortest scenario that fails.
    """
    while target.statistics["requests"] < requests:
        yield seed
        _play_seed(target, seed, scenarios)
        seed += 1


def _play_seed(target: Target, seed: int, scenarios: int) -> None:
    @hypothesis.seed(seed)
    @settings(
        max_examples=scenarios,
        deadline=None,
        database=None,
        phases=[Phase.generate, Phase.shrink],
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )
    @given(Requests(target.rules).scenarios())
    def run(scenario: Scenario) -> None:
        target.play(scenario)

    run()

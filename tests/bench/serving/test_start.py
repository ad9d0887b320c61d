from __future__ import annotations

from bench.serving.start import SHARED, Start, summary


def test_medians_are_taken_figure_by_figure() -> None:
    starts = [
        Start(ready, first, 7.0, {"serve": size, SHARED: 512.0})
        for ready, first, size in ((5.0, 9.0, 30.0), (3.0, 4.0, 50.0), (4.0, 6.0, 40.0))
    ]
    figures = summary(starts)
    assert (figures["ready_s"], figures["first_token_s"]) == (4.0, 6.0)
    assert figures["cpu_s"] == 7.0
    assert figures["memory_mib"] == {"serve": 40.0, SHARED: 512.0, "all": 552.0}

"""How the Spark session is set up. (What it does is seen wherever a bridge runs.)"""

from __future__ import annotations

import pytest

from bridge.spark.session import with_attempts


@pytest.mark.parametrize(
    ("master", "meant"),
    [
        ("local", "local[1,4]"),
        ("local[2]", "local[2,4]"),
        ("local[*]", "local[*,4]"),
        ("local[2,1]", "local[2,1]"),
        ("local[*, 8]", "local[*, 8]"),
        ("local-cluster[1,1,1024]", "local-cluster[1,1,1024]"),
        ("spark://spark:7077", "spark://spark:7077"),
    ],
)
def test_a_task_is_tried_again_unless_the_master_says_how_often(master: str, meant: str) -> None:
    """As on a cluster. What the operator wrote in full is kept."""
    assert with_attempts(master) == meant

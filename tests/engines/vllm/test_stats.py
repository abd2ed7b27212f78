"""What vLLM serves of our numbers."""

from pathlib import Path

from kvtide.engines import vllm
from kvtide.metrics import METRICS


def test_vllm_serves_only_counters_that_an_engine_counts() -> None:
    """One that the node counts would stand there without a number for ever."""
    code = "".join(
        path.read_text("utf-8") for path in Path(str(vllm.__file__)).parent.glob("*.py")
    )
    served = [one for one in METRICS if one.kind == "counter" and not one.is_of_node]
    assert served
    assert [one.name for one in served if f'"{one.source}' not in code] == []

"""On a GPU a whole step is one CUDA graph: nothing in it waits for the host."""

import pytest

from benchmarks import llama_step

pytestmark = pytest.mark.gpu


def thunks(folder):
    """What the compiled step consists of: (depth, kind), as XLA dumps it."""
    (path,) = folder.glob("*decode_step*thunk_sequence_after_thunk_passes.txt")
    for line in path.read_text().splitlines():
        number, colon, rest = line.partition(":")
        if colon and number.strip().isdigit():
            yield len(number) - len(number.lstrip()), rest.split()[0]


@pytest.mark.parametrize("released", [False, True])
def test_a_step_is_one_graph_with_at_most_one_conditional(tmp_path, released):
    model = llama_step.llama_config(
        num_layers=2, hidden_size=256, num_q_heads=8, num_kv_heads=2, vocab_size=1024
    )
    shape = llama_step.StepShape(model=model, num_seqs=4, seq_len=512)
    forward, params = llama_step.random_params(model)
    dump = {"xla_dump_to": str(tmp_path), "xla_dump_hlo_as_text": True}
    llama_step.lower_step(forward, params, shape, released=released).compile(dump)
    found = list(thunks(tmp_path))
    assert [kind for depth, kind in found if depth == 0] == ["kCommandBuffer"]
    kinds = [kind for _, kind in found]
    assert kinds.count("kConditional") == (0 if released else 1)
    assert "kWhile" not in kinds

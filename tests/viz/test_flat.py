"""The flat batch as a picture: every token is linked to the right entries, and what disagrees is named."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from contbatch import BatchedRequest, ScheduledBatch, StepRecord, Trace
from contbatch.batch import FlatBatch
from contbatch.errors import InvalidRequest, TraceError
from contbatch.viz import plots
from contbatch.viz.flat import MOST_TOKENS, FlatView, LinkedArrays, arrays, mask, padding

SIZE = 4
TEXTS = ["a", "b", "</script>", "$x", "$y", "f"]


@pytest.fixture
def flat() -> FlatBatch:
    """A prompt's last chunk behind 2 cached tokens, a first chunk, and a decode token behind 6."""
    batch = ScheduledBatch(
        0,
        [
            BatchedRequest.prefill("a", [5, 6, 7], 0, [4, 2], start_position=2),
            BatchedRequest.prefill("b", [8, 9], 1, [7], is_last_chunk=False),
            BatchedRequest.decode("c", 1, 6, 2, [9, 3], context_len=6),
        ],
    )
    return batch.flatten(SIZE)


def test_every_token_is_linked_to_the_entries_that_speak_of_it(flat: FlatBatch) -> None:
    view = FlatView(flat, SIZE)
    assert not view.problems
    for link in view.links:
        assert flat.cu_seqlens[link.row] <= link.token < flat.cu_seqlens[link.row + 1]
        assert flat.positions[link.token] == link.position == link.due
        assert flat.block_tables[link.row, link.column] == link.block == link.slot // SIZE
        assert link.sampled == (link.token in flat.sample_rows)
    assert [link.row for link in view.links] == [0, 0, 0, 1, 1, 2]
    assert [link.column for link in view.links] == [0, 0, 1, 0, 0, 1]


def test_the_mask_is_block_diagonal_and_causal_with_the_cache(flat: FlatBatch) -> None:
    """A token sees the keys of its own request up to its own position, and no other."""
    view = FlatView(flat, SIZE)
    owner = np.repeat(np.arange(3), flat.seq_lens)
    at = np.concatenate([np.arange(n) for n in flat.seq_lens])
    allowed = (owner == view.owner[:, None]) & (at <= flat.positions[:, None])
    for link in view.links:
        assert np.flatnonzero(allowed[link.token]).tolist() == list(range(*link.keys))
    assert view.num_pairs == allowed.sum()


def test_captions_give_the_numbers(flat: FlatBatch) -> None:
    view = FlatView(flat, SIZE)
    assert view.arrays_caption == (
        "6 tokens of 3 requests on one axis: 5 prefill and 1 decode, 8 tokens already in the cache; "
        "2 rows sampled; every array agrees with the others."
    )
    assert view.mask_caption.startswith("Attention mask: 6 tokens by 14 keys; 22 of 84 pairs are allowed (26 %)")


def test_a_sentence_says_everything_of_a_token(flat: FlatBatch) -> None:
    said = FlatView(flat, SIZE, TEXTS).sentence(2)
    for part in (
        "Token 2 of 6: new token 3 of 3 of a (prefill)",
        "cu_seqlens[0] = 0 ≤ 2 < 3 = cu_seqlens[1]",
        "input_ids[2] = 7 ('</script>')",
        "positions[2] = 4: 2 tokens of a in the cache and 2 new before it",
        "slot_mapping[2] = 8: block 2 = block_tables[0, 1] at offset 0",
        "It looks at 5 tokens of a, itself included; its logits are sampled.",
    ):
        assert part in said
    assert "nothing is sampled" in FlatView(flat, SIZE).sentence(4)


def test_positions_that_forget_the_cache_are_named(flat: FlatBatch) -> None:
    view = FlatView(replace(flat, positions=np.array([0, 1, 2, 0, 1, 0])), SIZE)
    assert [(p.array, p.entry) for p in view.problems] == [("positions", t) for t in (0, 1, 2, 5)]
    assert (
        "positions[5] is 0: 6 tokens of c in the cache and 0 new before it, so it must be 6" in view.problems[-1].text
    )
    assert "4 entries disagree, first positions[0] is 0" in view.arrays_caption
    assert "(✘ must be 6)" in view.sentence(5)
    assert view.payload("")["problems"][-1] == "and 1 more"


@pytest.mark.parametrize(
    ("array", "values", "words"),
    [
        ("slot_mapping", [18, 19, 8, 28, 29, 15], "slot_mapping[5] is 15: its K and V go to block 3"),
        ("sample_rows", [2, 3, 5], "sample_rows names token 3, which is not the last of b"),
    ],
)
def test_other_entries_that_disagree_are_named(flat: FlatBatch, array: str, values: list[int], words: str) -> None:
    [problem] = FlatView(replace(flat, **{array: np.array(values)}), SIZE).problems
    assert problem.array == array and words in problem.text


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"cu_seqlens": np.array([0, 3, 5])}, "4 rising entries"),
        ({"cu_seqlens": np.array([0, 5, 3, 6])}, "rising"),
        ({"positions": np.arange(4)}, "positions has 4 entries; it needs 6"),
        ({"input_ids": np.array([], dtype=np.int64)}, "0 tokens"),
        ({"input_ids": np.arange(MOST_TOKENS + 1)}, "1 to 64"),
    ],
)
def test_what_is_no_flat_batch_is_refused(flat: FlatBatch, change: dict[str, object], words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        FlatView(replace(flat, **change), SIZE)
    with pytest.raises(InvalidRequest, match="2 texts for 6 tokens"):
        FlatView(flat, SIZE, ["a", "b"])


def test_figures_carry_their_captions(flat: FlatBatch) -> None:
    view = FlatView(flat, SIZE, TEXTS)
    assert plots.figure(arrays(view)).caption == view.arrays_caption
    assert plots.figure(arrays(view, 2)).caption == f"{view.arrays_caption} {view.sentence(2)}"
    assert plots.figure(mask(view, 0)).caption == view.mask_caption
    assert plots.figure(arrays(FlatView(replace(flat, positions=flat.positions * 0), SIZE))).png[:4] == b"\x89PNG"


def test_padding_counts_the_places_of_a_rectangle() -> None:
    """Requests times the longest, in every step that computed something."""
    trace = Trace(steps=[StepRecord(0), StepRecord(1, request_ids=["a", "b"], counts=[7, 1], kinds="PD")])
    trace.steps.append(StepRecord(2, request_ids=["a", "b"], counts=[1, 1], kinds="DD"))
    assert plots.figure(padding(trace)).caption == (
        "10 tokens in 2 steps; padded to rectangles they would take 16 places, 38 % of them empty; "
        "most in step 1: 14 places for 8 tokens."
    )
    with pytest.raises(TraceError, match="run the engine first"):
        padding(Trace())


def test_the_widget_is_a_figure_and_a_sentence_where_it_cannot_live(flat: FlatBatch) -> None:
    widget = LinkedArrays(flat, SIZE, TEXTS, token=2)
    bundle = widget._repr_mimebundle_()
    assert set(bundle) == {"application/vnd.jupyter.widget-view+json", "text/html", "text/plain"}
    assert bundle["text/plain"] == widget.caption
    assert "</script>" not in bundle["text/html"] and 'alt="6 tokens' in bundle["text/html"]
    widget.token = 99
    assert widget.token == 5 and "Token 5 of 6" in widget.caption


def test_the_payload_is_plain_data_that_the_page_only_paints(flat: FlatBatch) -> None:
    view = FlatView(flat, SIZE, TEXTS)
    data = json.loads(json.dumps(view.payload("title")))
    assert [token["said"] for token in data["tokens"]] == [view.sentence(t) for t in range(6)]
    assert dict(data["requestRows"])["cu_seqlens"] == ["0", "3", "5", "6"]
    assert [request["keys"] for request in data["requests"]] == [[0, 5], [5, 7], [7, 14]]

"""Pictures in a row: embeddings of their own at their positions, whatever is done to the row."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import lmstate
from lmstate import Media, kv
from lmstate.state.media import MediaSpan, identities, spans_from_json, spans_to_json
from tests.zoo import ours, pair, text

PLACEHOLDER = 7
GRID = 2, 4, 3  # frames, rows, columns of a picture with axes


def picture(count: int, width: int, seed: int, axes: bool = False) -> Media:
    generator = torch.Generator().manual_seed(seed)
    embeddings = torch.randn(count, width, generator=generator)
    if not axes:
        return Media.of(embeddings, PLACEHOLDER)
    grid = torch.stack(torch.meshgrid(*map(torch.arange, GRID), indexing="ij")).flatten(1)
    return Media.of(torch.randn(grid.shape[1], width, generator=generator), PLACEHOLDER, grid)


def story(
    model: lmstate.Model, seed: int = 0, axes: bool = False, deep: int = 0
) -> tuple[list[int], tuple[MediaSpan, ...]]:
    """A text of some 80 tokens that begins and ends with a picture, and has two more that follow each other.

    `deep`: blocks behind which one of these adds to the stream.
    """
    ids: list[int] = []
    spans = []
    for index, between in enumerate((0, 19, 0, 11)):
        ids += text(between, seed=seed + index)[0].tolist() if between else []
        width = model.config.hidden_size * (1 + deep * (index == 2))
        made = picture(5 + 4 * index, width, 10 * seed + index, axes and index != 1)
        spans.append(MediaSpan(len(ids), made))
        ids += [PLACEHOLDER] * made.count
    return ids, tuple(spans)


def with_text(ids: list[int], spans: tuple[MediaSpan, ...]) -> tuple[MediaSpan, ...]:
    """The same pictures, each one piece with up to five tokens of text behind it."""
    ends = [span.at for span in spans[1:]] + [len(ids)]
    pairs = ((span, ids[span.end : min(span.end + 5, end)]) for span, end in zip(spans, ends))
    made = ((span.at, span.media, behind) for span, behind in pairs)
    return tuple(MediaSpan(at, Media.of(one.embeddings, one.token, text=own)) for at, one, own in made)  # type: ignore


def placed(state: lmstate.State, spans: tuple[MediaSpan, ...], row: int = 0) -> lmstate.State:
    for span in spans:
        if span not in state.media(row):
            state.place(row, span.at, span.media)
    return state


def whole(model: lmstate.Model, ids: list[int], spans: tuple[MediaSpan, ...]) -> Tensor:
    """float32 `[T, V]`, fed at once."""
    logits = model([ids], placed(model.new_state(), spans), logits="all")
    assert logits is not None
    return logits[0]


CASES = [
    "llama",
    "gpt2",
    "mistral",
    "gemma2",
    "deepseek_v3",
    "falcon_h1",
    "qwen3_5",
    "lfm2",
    "qwen2_vl",
    "qwen3_vl",
    "glm4v",
]


def has_axes(case: str) -> bool:
    return "_vl" in case or case == "glm4v"


@pytest.mark.parametrize("case", ["llama", "gpt2", "mistral", "lfm2"])
def test_logits_are_those_of_the_embeddings(case: str) -> None:
    theirs, model = pair(case)
    ids, spans = story(model)
    embeds = theirs.get_input_embeddings()(torch.tensor([ids])).detach()
    for span in spans:
        embeds[0, span.at : span.end] = span.media.embeddings
    with torch.no_grad():
        expected = theirs(inputs_embeds=embeds).logits[0]
    torch.testing.assert_close(whole(model, ids, spans), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("case", CASES)
def test_no_interleaving_changes_a_bit(case: str, tmp_path: Path) -> None:
    """Any cut, drafts, rewinds before, into and behind pictures, forks, marks, snapshots in memory and in a file."""
    model, luck = ours(case), random.Random(case)
    ids, spans = story(model, axes=has_axes(case), deep=2 if case in ("llama", "qwen3_vl") else 0)
    expected = whole(model, ids, spans)
    state = model.new_state(rows=2, rewind=9)
    kept = None
    folder = lmstate.SnapshotFolder(tmp_path / "folder")
    for _ in range(60):
        row = luck.randrange(2)
        length = state.lengths[row]
        placed(state, tuple(span for span in spans if span.at >= length), row)
        match luck.choice(["extend"] * 4 + ["draft", "near", "far", "fork", "mark", "snapshot", "restore", "queue"]):
            case "extend" if length < len(ids):
                new = ids[length : length + luck.choice([1, 1, 2, 5, 17, 40])]
                got = model([new if i == row else [] for i in range(2)], state, logits="all")
                assert got is not None and torch.equal(got[row, : len(new)], expected[length : length + len(new)])
            case "draft" if length < len(ids):
                new = ids[length : length + luck.randint(1, 12)]
                model([new if i == row else [] for i in range(2)], state, logits="all", commit=False)
                state.commit([luck.randint(0, len(new)) if i == row else 0 for i in range(2)])
            case "queue" if length < len(ids):
                state.queue(row, ids[length : length + luck.randint(1, 12)])
            case "near":
                state.rewind(row, max(0, length - luck.randint(0, 9)))
            case "far":
                state.rewind(row, luck.randint(0, length))
            case "fork":
                state.select([row, row])
            case "mark":
                state.mark(row)
            case "snapshot":
                kept = state.snapshot(row)
                if luck.random() < 0.5:
                    kept.save(tmp_path / "row")
                    kept = lmstate.Snapshot.load(tmp_path / "row")
                else:
                    folder.save("row", kept)
                    kept = folder.load("row")
            case "restore" if kept is not None:
                state.restore(row, kept)
                assert state.media(row) == kept.media
        held = state.lengths[row]
        assert state.tokens(row) == ids[:held]
        assert all(span in spans for span in state.media(row))
        if held:
            last = model([[], []], state)
            assert last is not None and torch.equal(last[row], expected[held - 1])


@pytest.mark.parametrize("name", ["Qwen2VL", "Qwen2_5_VL", "Qwen3VL"])
def test_positions_have_axes(name: str) -> None:
    case = {"Qwen2VL": "qwen2_vl", "Qwen2_5_VL": "qwen2_5_vl", "Qwen3VL": "qwen3_vl"}[name]
    theirs, model = pair(case)
    ids, spans = story(model, axes=True)
    embeds = theirs.get_input_embeddings()(torch.tensor([ids])).detach()
    positions, at, shift = torch.zeros(3, len(ids), dtype=torch.int64), 0, 0
    for span in (*spans, None):
        stop = len(ids) if span is None else span.at
        positions[:, at:stop] = torch.arange(at, stop) - shift
        if span is not None:
            embeds[0, span.at : span.end] = span.media.embeddings
            own = torch.arange(span.media.count).expand(3, -1) if (given := span.media.positions) is None else given
            positions[:, span.at : span.end] = own + span.at - shift
            shift += span.media.count - (int(own.max()) + 1)
            at = span.end
    with torch.no_grad():
        hidden = theirs.model.language_model(inputs_embeds=embeds, position_ids=positions[:, None]).last_hidden_state
        expected = theirs.lm_head(hidden)[0]
    torch.testing.assert_close(whole(model, ids, spans), expected, atol=1e-4, rtol=1e-4)


def test_rows_have_pictures_of_their_own() -> None:
    model = ours("llama")
    stories = [story(model, seed) for seed in (0, 3)]
    state = model.new_state(rows=3)
    for row, (_, spans) in enumerate(stories):
        placed(state, spans, row)
    got = model([ids for ids, _ in stories] + [stories[0][0]], state, logits="all")
    assert got is not None
    for row, (ids, spans) in enumerate(stories):
        torch.testing.assert_close(got[row], whole(model, ids, spans), atol=1e-4, rtol=1e-4)
    assert not torch.allclose(got[2], got[0], atol=0.1), "the same ids without pictures are another text"
    assert state.media(2) == ()


def test_other_tokens_than_the_picture_has_are_refused() -> None:
    model = ours("llama")
    state = model.new_state()
    state.place(0, 2, picture(4, 48, 0))
    with pytest.raises(lmstate.StateError, match="each of its tokens is 7; to put another text there, rewind to 2"):
        model([[1, 2, 7, 8]], state)
    assert state.lengths == [0]
    model([[1, 2, 7, 7]], state)
    with pytest.raises(lmstate.StateError, match="token at 5 is 9"):
        state.queue(0, [7, 9])
    state.rewind(0, 2)
    assert state.media(0) == ()
    model([[9]], state)


def test_where_a_picture_cannot_stand() -> None:
    model, made = ours("llama"), picture(4, 48, 0)
    state = model.new_state(capacity=20)
    model([[1, 2, 3]], state)
    state.place(0, 5, made)
    bad: list[tuple[int, Any, str]] = [
        (2, made, "rewind to 2 first"),
        (6, made, "begins before the one in front of it ends"),
        (3, made, "begins before the one in front of it ends"),
        (17, made, "do not fit"),
        (10, picture(4, 40, 0), "as wide as 48"),
        (10, picture(4, 48, 0, axes=True), "rope has one"),
        (10, "a picture", "make one with Media.of"),
        (10, Media.of(torch.zeros(2, 48), 99), "token id 99"),
        (10, made.without_embeddings(), "make it again"),
    ]
    for at, media, said in bad:
        with pytest.raises(lmstate.StateError, match=said):
            state.place(0, at, media)
    assert [span.at for span in state.media(0)] == [5]
    with pytest.raises(lmstate.UnsupportedError, match="static"):
        model.new_state(capacity=20, static=True).place(0, 0, made)
    axes = ours("qwen2_vl")
    with pytest.raises(lmstate.UnsupportedError, match="evicts"):
        axes.new_state(kv=kv.Recent(20)).place(0, 0, picture(0, 48, 0, axes=True))


def test_a_span_is_dropped_with_its_pictures() -> None:
    model = ours("llama")
    ids, spans = story(model)
    state = placed(model.new_state(), spans)
    model([ids], state)
    assert not state.can_drop(0, 2, 9), "it would cut the first picture"
    first, second = spans[:2]
    state.drop(0, first.end, second.end)
    assert state.media(0) == (first, *(MediaSpan(s.at - (second.end - first.end), s.media) for s in spans[2:]))
    assert state.tokens(0) == ids[: first.end] + ids[second.end :]


def test_embeddings_that_were_let_go() -> None:
    model = ours("lfm2")
    ids, spans = story(model)
    state = placed(model.new_state(rewind=0), spans)
    model([ids[: spans[1].end + 4]], state)
    state.mark(0)
    model([ids[spans[1].end + 4 : -3]], state)
    light = state.snapshot(0).without_embeddings()
    assert light.nbytes < state.snapshot(0).nbytes
    state = model.new_state(rewind=0)
    state.restore(0, light)
    with pytest.raises(lmstate.RewindError, match=r"picture at 0 to 5 .* or rewind to 0"):
        state.rewind(0, spans[1].end)
    assert state.lengths == [len(ids) - 3], "the last picture was not read whole: its embeddings are there"
    last = model([ids[-3:]], state)
    assert last is not None and torch.equal(last[0], whole(model, ids, spans)[-1])
    for span in spans:
        state.place(0, span.at, span.media)
    state.rewind(0, spans[1].end)
    again = model([[]], state)
    assert again is not None and torch.equal(again[0], whole(model, ids, spans)[spans[1].end - 1])


def test_rows_beside_one_that_cannot_be_computed_again_stay_as_they_are() -> None:
    """A longer text rotates by other frequencies, and its row is computed from its start."""
    model = ours("llama-dynamic")
    state = placed(model.new_state(rows=2), (span := MediaSpan(3, picture(4, model.config.hidden_size, 0)),), row=1)
    model([[1, 2, 3], [1, 2, 3, *span.media.ids, 5]], state)
    state.restore(1, state.snapshot(1).without_embeddings())
    longer = text(400)[0].tolist()
    with pytest.raises(lmstate.StateError, match="row 1 is to be computed from 0 on"):
        model([longer, longer], state)
    assert state.lengths == [3, 8] and [state.rewind_cost(0, 3), state.rewind_cost(1, 8)] == [0, 0]
    assert state.kept(0, 0)[0] == [0, 1, 2]


def test_bytes_are_counted_once() -> None:
    model = ours("llama")
    ids, spans = story(model)
    state = placed(model.new_state(), spans)
    model([ids], state)
    state.select([0, 0])
    assert state.memory()["media"] == sum(span.media.count for span in spans) * 48 * 4


def test_another_picture_is_another_text() -> None:
    one, other = picture(4, 48, 0), picture(4, 48, 1)
    ids = [1, 7, 7, 7, 7, 2]
    first, second, none = (identities(ids, spans) for spans in ((MediaSpan(1, one),), (MediaSpan(1, other),), ()))
    assert none == ids
    assert [first[0], first[5]] == [1, 2]
    assert len({*first, *second}) == 10
    assert identities(ids[:3], (MediaSpan(1, one),)) == first[:3]
    assert Media.of(one.embeddings.clone(), 7) == one  # type: ignore[union-attr]


def test_damaged_files(tmp_path: Path) -> None:
    from lmstate.state.layer_file import read_layers, write_layers
    from lmstate.state.snapshot import FORMAT, VERSION

    model = ours("llama")
    ids, spans = story(model)
    state = placed(model.new_state(), spans)
    model([ids], state)
    state.snapshot(0).save(tmp_path / "good")
    metadata, tensors = read_layers(tmp_path / "good", FORMAT, VERSION, "snapshot")
    other = {**tensors, "media.0.embeddings": tensors["media.0.embeddings"] + 1}
    least = {name: tensor for name, tensor in tensors.items() if not name.startswith("media.0")}
    bad: list[tuple[dict[str, str], dict[str, Tensor]]] = [
        (metadata, other),
        ({**metadata, "media": "[]"}, tensors),
        ({**metadata, "media": "[[0, 7, 5]]"}, tensors),
        ({**metadata, "media": '[[0, 7, -5, ""]]'}, tensors),
        ({**metadata, "media": "[" * 100_000}, tensors),
        (metadata, {**tensors, "media.0.positions": torch.zeros(3, 5, dtype=torch.int64)}),
    ]
    for known, parts in bad:
        write_layers(tmp_path / "bad", known, parts)
        with pytest.raises(lmstate.SnapshotError):
            lmstate.Snapshot.load(tmp_path / "bad")
    write_layers(tmp_path / "light", metadata, least)
    assert lmstate.Snapshot.load(tmp_path / "light").media == spans
    write_layers(tmp_path / "moved", {**metadata, "media": metadata["media"].replace("[[0,", "[[1,")}, tensors)
    with pytest.raises(lmstate.SnapshotError, match="token at"):
        model.new_state().restore(0, lmstate.Snapshot.load(tmp_path / "moved"))


WHOLE = {
    "gemma3": None,
    "gemma3-pattern": None,
    "gemma4_unified": None,
    "gemma3-pattern text": None,
    "gemma3 8 bits": kv.Quantized(8),
    "gemma3 4 bits": kv.Quantized(4),
}


def whole_case(case: str) -> tuple[lmstate.Model, Any]:
    return ours(case.split(" ")[0]), WHOLE[case]


@pytest.mark.parametrize("case", WHOLE)
def test_whole_pictures_are_one_piece_however_the_text_is_cut(case: str, tmp_path: Path) -> None:
    """Any cut but inside a picture, in steps of several parts, beside another row, with drafts, rewinds and forks."""
    (model, policy), luck = whole_case(case), random.Random(case)
    ids, spans = story(model)
    more, others = story(model, seed=5)
    if case.endswith("text"):
        spans, others = with_text(ids, spans), with_text(more, others)
    ids, spans = [*ids, *more], (*spans, *(MediaSpan(span.at + len(ids), span.media) for span in others))
    state = model.new_state(kv=policy)
    assert state.whole_pictures
    expected = model([ids], placed(state, spans), logits="all")
    assert expected is not None
    expected = expected[0]
    borders = [at for at in range(len(ids) + 1) if not any(span.at < at < span.end for span in spans)]

    def cut(length: int, most: int) -> list[int]:
        """The next tokens, about so many of them."""
        ends = [at for at in borders if at > length]
        return ids[length : next((at for at in reversed(ends) if at <= length + most), ends[0])]

    state, kept = model.new_state(rows=2, rewind=9, kv=policy), None
    object.__setattr__(state.layout, "chunk", 24)
    for _ in range(80):
        row = luck.randrange(2)
        length = state.lengths[row]
        for each in range(2):
            placed(state, tuple(span for span in spans if span.at >= state.lengths[each]), each)
        match luck.choice(
            ["both"] * 3 + ["extend"] * 2 + ["draft", "near", "far", "fork", "mark", "snapshot", "restore"]
        ):
            case "both":
                rows = [cut(held, luck.choice([1, 9, 40])) if held < len(ids) else [] for held in state.lengths]
                before = state.lengths
                got = model(rows, state, logits="all")
                assert got is not None
                for each, (start, part) in enumerate(zip(before, rows)):
                    assert torch.equal(got[each, : len(part)], expected[start : start + len(part)])
            case "extend" if length < len(ids):
                new = cut(length, luck.choice([1, 2, 5, 17, 90]))
                got = model([new if i == row else [] for i in range(2)], state, logits="all")
                assert got is not None and torch.equal(got[row, : len(new)], expected[length : length + len(new)])
            case "draft" if length < len(ids):
                new = cut(length, luck.randint(1, 30))
                model([new if i == row else [] for i in range(2)], state, logits="all", commit=False)
                inside = [n for n in range(len(new) + 1) if length + n not in borders]
                if inside:
                    with pytest.raises(lmstate.PendingError, match="inside a picture"):
                        state.commit([luck.choice(inside) if i == row else 0 for i in range(2)])
                n = luck.choice([n for n in range(len(new) + 1) if length + n in borders])
                state.commit([n if i == row else 0 for i in range(2)])
            case "near":
                state.rewind(row, luck.choice([at for at in borders if length - 12 <= at <= length]))
            case "far":
                state.rewind(row, luck.choice([at for at in borders if at <= length]))
            case "fork":
                state.select([row, row])
            case "mark":
                state.mark(row)
            case "snapshot":
                state.snapshot(row).save(tmp_path / "row")
                kept = lmstate.Snapshot.load(tmp_path / "row")
            case "restore" if kept is not None:
                state.restore(row, kept)
        held = state.lengths[row]
        assert state.tokens(row) == ids[:held]
        if held:
            last = model([[], []], state)
            assert last is not None and torch.equal(last[row], expected[held - 1])


def test_no_step_or_rewind_ends_inside_a_whole_picture() -> None:
    model = ours("gemma3")
    ids, spans = story(model)
    state = placed(model.new_state(), spans)
    second = spans[1]
    said = f"its positions are {second.at} to {second.end}, so stop at {second.at} or at {second.end}"
    with pytest.raises(lmstate.StateError, match=said):
        model([ids[: second.at + 3]], state)
    with pytest.raises(lmstate.StateError, match=said):
        state.queue(0, ids[: second.end - 1])
    assert state.lengths == [0]
    model([ids[: spans[2].end + 2]], state)
    with pytest.raises(lmstate.RewindError, match=said):
        state.rewind(0, second.at + 1)
    assert state.lengths == [spans[2].end + 2]
    with pytest.raises(lmstate.UnsupportedError, match="as one piece"):
        placed(model.new_state(kv=kv.Recent(9)), spans)
    cut = replace(state.snapshot(0), tokens=tuple(ids[: second.at + 3]), cached=second.at + 3)
    with pytest.raises(lmstate.SnapshotError, match="stop at"):
        model.new_state().restore(0, cut)
    assert not ours("llama").new_state().whole_pictures


@pytest.mark.parametrize("case", ["gemma3", "gemma3-pattern", "gemma4_unified"])
def test_tokens_of_a_whole_picture_see_the_rest_of_it(case: str) -> None:
    """Its last embedding changes what its first token gives; a later picture does not."""
    model = ours(case)
    ids, spans = story(model)
    expected = whole(model, ids, spans)
    for index, changed in enumerate(spans):
        assert changed.media.embeddings is not None
        embeddings = changed.media.embeddings.clone()
        embeddings[-1] += 1
        other = MediaSpan(changed.at, Media.of(embeddings, PLACEHOLDER))
        got = whole(model, ids, (*spans[:index], other, *spans[index + 1 :]))
        assert torch.equal(got[: changed.at], expected[: changed.at])
        assert not torch.allclose(got[changed.at], expected[changed.at], atol=1e-5)


def test_records_of_pictures_with_text_are_checked() -> None:
    model = ours("gemma3")
    ids, spans = story(model)
    spans = with_text(ids, spans)
    told = spans_to_json(spans)
    assert tuple(spans_from_json(told, ids)) == spans
    assert sum(bool(span.media.text) for span in spans) > 1
    longest = max(range(len(told)), key=lambda index: len(told[index]))
    assert len(told[longest]) == 6
    for damaged in ([], [1, "a"], [-1], [True], [2**40], 5, list(range(told[longest][2]))):
        wrong = [list(each) for each in told]
        wrong[longest][4] = damaged
        with pytest.raises(lmstate.SnapshotError, match="damaged"):
            spans_from_json(wrong, ids)
    with pytest.raises(lmstate.StateError, match="several axes"):
        Media.of(torch.zeros(2, 4), 1, torch.zeros(3, 2, dtype=torch.int64), [5])

"""Which passages a calibration runs, cut to tokens, and in which batches.

The plan depends on the text, the seed and the sizes asked for, and on nothing else:
every process and every restart makes the same one.
"""

import bisect
import hashlib
import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from jaxtyping import Int32

from fp8kv_jax.scales.corpus import (
    Content,
    DataSource,
    Passage,
    SourceRecord,
    load_passage,
    read_passages,
)
from fp8kv_jax.scales.manifest import (
    ClassCount,
    DataFile,
    DataManifest,
    Envelope,
    Percentiles,
)

type Encode = Callable[[Content], list[int]]

# A passage of this many bytes a token leaves room for a cut at random: text has 3 to
# 5 bytes a token.
PASSAGE_BYTES_PER_TOKEN = 8
# Lengths of batches, and strata of passages, as divisors of the longest.
LENGTH_DIVISORS = (8, 4, 2, 1)
_BYTES_PER_TOKEN = 4


@dataclass(frozen=True, kw_only=True, eq=False)
class Sample:
    """A passage as the model sees it, and the file it is from."""

    path: Path
    class_index: int
    token_ids: Int32[np.ndarray, "num_tokens"]


@dataclass(frozen=True, kw_only=True)
class BatchSpec:
    """A batch of one device: its shape, and which samples fill its rows in order.

    The composition never depends on devices or processes, so that neither does what
    a sample's neighbours do to the last bit of its activations.
    """

    num_rows: int
    length: int
    samples: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class SamplePlan:
    """The samples of a run in their order, longest first."""

    classes: tuple[str, ...]
    samples: tuple[Sample, ...]
    records: tuple[SourceRecord, ...]
    num_duplicates: int
    num_samples_asked: int
    max_seq_len: int
    seed: int

    @property
    def num_tokens(self) -> int:
        return sum(len(sample.token_ids) for sample in self.samples)

    def batches(self, batch_size: int) -> tuple[BatchSpec, ...]:
        """Lays the samples out in few shapes of about equally many tokens.

        Args:
          batch_size: rows of a batch of the longest samples; batches of shorter ones
            have more rows.
        """
        specs = []
        lengths = bucket_lengths(self.max_seq_len)
        buckets: dict[int, list[int]] = {length: [] for length in reversed(lengths)}
        for index, sample in enumerate(self.samples):
            buckets[_bucket(lengths, len(sample.token_ids))].append(index)
        for length, members in buckets.items():
            num_rows = batch_size * self.max_seq_len // length
            for start in range(0, len(members), num_rows):
                rows = tuple(members[start : start + num_rows])
                specs.append(BatchSpec(num_rows=num_rows, length=length, samples=rows))
        return tuple(specs)

    def build(
        self, spec: BatchSpec
    ) -> tuple[
        Int32[np.ndarray, "num_rows length"],
        Int32[np.ndarray, "num_rows"],
    ]:
        """Makes a batch: token ids padded with 0, and how many of each row are real."""
        token_ids = np.zeros((spec.num_rows, spec.length), np.int32)
        lengths = np.zeros(spec.num_rows, np.int32)
        for row, index in enumerate(spec.samples):
            ids = self.samples[index].token_ids
            token_ids[row, : len(ids)] = ids
            lengths[row] = len(ids)
        return token_ids, lengths

    def count(
        self, specs: Sequence[BatchSpec]
    ) -> tuple[
        Int32[np.ndarray, "num_classes"],
        Int32[np.ndarray, "num_classes"],
    ]:
        """Counts the tokens and the samples of each class in some batches."""
        num_tokens = np.zeros(len(self.classes), np.int64)
        num_samples = np.zeros(len(self.classes), np.int64)
        for spec in specs:
            for sample in (self.samples[index] for index in spec.samples):
                num_tokens[sample.class_index] += len(sample.token_ids)
                num_samples[sample.class_index] += 1
        return num_tokens, num_samples


def make_plan(
    sources: Sequence[DataSource],
    encode: Encode,
    *,
    num_samples: int,
    max_seq_len: int,
    seed: int,
    bos_id: int | None = None,
) -> SamplePlan:
    """Draws samples: as equally from each class, and from each length, as there is.

    Equal passages of a class count once. A sample longer than `max_seq_len` is cut at
    a random start; a BOS in front of it stays in front.

    Args:
      sources: where text comes from; several may share a class.
      encode: makes token ids of a text or of a conversation.
      num_samples: how many to draw. Fewer are drawn if there are no more.
      max_seq_len: tokens of the longest sample.
      seed: what draws and cuts depend on, besides the text itself.
      bos_id: token that starts a text.

    Raises:
      ValueError: if a source can't be read, or there is no text at all.
    """
    if not sources or num_samples < 1 or max_seq_len < 1:
        raise ValueError(
            "Expected at least one data source, num_samples >= 1 and max_seq_len >= 1, "
            f"got {len(sources)}, {num_samples} and {max_seq_len}."
        )
    classes = tuple(dict.fromkeys(source.class_name for source in sources))
    draws = {name: _Draw(name, num_samples, max_seq_len, seed) for name in classes}
    records = tuple(SourceRecord(source=source) for source in sources)
    for record in records:
        draws[record.source.class_name].read(record)
    quotas = allot(num_samples, [draw.num_candidates for draw in draws.values()])
    samples = []
    for index, (draw, quota) in enumerate(zip(draws.values(), quotas, strict=True)):
        for priority, passage in draw.best(quota):
            ids = _cut(_encode(encode, passage), max_seq_len, priority, bos_id)
            if ids.size:
                samples.append((-ids.size, priority, index, ids, passage.path))
    if not samples:
        looked = ", ".join(str(source.path) for source in sources)
        raise ValueError(f"Expected text in the data, found none in {looked}.")
    samples.sort(key=lambda sample: sample[:3])
    return SamplePlan(
        classes=classes,
        samples=tuple(
            Sample(path=path, class_index=index, token_ids=ids)
            for _, _, index, ids, path in samples
        ),
        records=records,
        num_duplicates=sum(draw.num_duplicates for draw in draws.values()),
        num_samples_asked=num_samples,
        max_seq_len=max_seq_len,
        seed=seed,
    )


def describe_data(plan: SamplePlan) -> DataManifest:
    """Says what a plan rests on, for the manifest.

    A folder is an entry of its own, under its name and a slash: its hash is over the
    names and hashes of all its text files. Of these, the ones that gave a sample are
    entries too.
    """
    files = []
    used = {sample.path: sample.class_index for sample in plan.samples}
    for record in plan.records:
        source = record.source
        is_folder, name = source.kind == "folder", source.path.resolve().name
        files.append(
            DataFile(
                name=f"{name}/" if is_folder else name,
                sha256=record.sha256,
                num_bytes=record.num_bytes,
                data_class=source.class_name,
            )
        )
        below = [p for p in sorted(used) if is_folder and source.path in p.parents]
        for path in below:
            inside = f"{name}/{path.relative_to(source.path).as_posix()}"
            label = plan.classes[used[path]]
            files.append(DataFile.of(path, name=inside, data_class=label))
    num_tokens, num_samples = plan.count(plan.batches(1))
    counts = zip(plan.classes, num_samples, num_tokens, strict=True)
    return DataManifest(
        source="files",
        files=tuple(files),
        classes={
            name: ClassCount(samples=int(samples), tokens=int(tokens))
            for name, samples, tokens in counts
        },
        num_samples=len(plan.samples),
        tokens_seen=plan.num_tokens,
        seed=plan.seed,
        max_length=plan.max_seq_len,
    )


def describe_envelope(plan: SamplePlan) -> Envelope:
    """Says what traffic a plan stands for: lengths of its samples, and its classes."""
    lengths = [len(sample.token_ids) for sample in plan.samples]
    return Envelope(
        longest_context=max(lengths),
        prompt_lengths=Percentiles.of(lengths),
        classes=plan.classes,
    )


def allot(total: int, available: Sequence[int]) -> list[int]:
    """Shares a total as equally as each part has it; the first ones get what is over.

    `allot(10, [2, 9, 9])` is `[2, 4, 4]`.
    """
    given = [0] * len(available)
    while total > 0:
        open_parts = [i for i, have in enumerate(available) if given[i] < have]
        if not open_parts:
            break
        share = max(1, total // len(open_parts))
        for i in open_parts:
            more = min(share, available[i] - given[i], total)
            given[i] += more
            total -= more
    return given


def bucket_lengths(max_seq_len: int) -> list[int]:
    """Lists the lengths that batches come in, ascending; the last is `max_seq_len`."""
    return sorted({-(-max_seq_len // divisor) for divisor in LENGTH_DIVISORS})


def _bucket(lengths: list[int], num_tokens: int) -> int:
    return lengths[bisect.bisect_left(lengths, num_tokens)]


@dataclass
class _Draw:
    """Keeps the passages of a class with the smallest hashes, by length.

    A passage's priority is a hash of the seed and of its content: the order of files
    does not matter, equal passages meet, and memory does not grow with the data.
    """

    class_name: str
    capacity: int
    max_seq_len: int
    seed: int
    num_duplicates: int = 0
    _strata: dict[int, "_Smallest"] = field(default_factory=dict)

    @property
    def num_candidates(self) -> int:
        return sum(len(stratum) for stratum in self._strata.values())

    def read(self, record: SourceRecord) -> None:
        """Offers all passages of a source."""
        max_bytes = PASSAGE_BYTES_PER_TOKEN * self.max_seq_len
        for passage in read_passages(record, max_bytes=max_bytes):
            self.offer(passage)

    def offer(self, passage: Passage) -> None:
        lengths = bucket_lengths(self.max_seq_len)
        guess = min(-(-passage.text_size // _BYTES_PER_TOKEN), self.max_seq_len)
        stratum = self._strata.setdefault(
            _bucket(lengths, guess), _Smallest(self.capacity)
        )
        key = f"{self.seed}\0{self.class_name}\0".encode() + passage.digest
        priority = hashlib.sha256(key).digest()
        self.num_duplicates += not stratum.offer(priority, passage)

    def best(self, number: int) -> list[tuple[bytes, Passage]]:
        """The passages drawn, as equally from each length as there is."""
        strata = [self._strata[length] for length in sorted(self._strata)]
        quotas = allot(number, [len(stratum) for stratum in strata])
        chosen = zip(strata, quotas, strict=True)
        return [item for stratum, quota in chosen for item in stratum.sorted()[:quota]]


class _Smallest:
    """The passages of the smallest priorities, at most `capacity`, each once."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._passages: dict[bytes, Passage] = {}
        self._heap: list[bytes] = []  # priorities inverted: the largest is on top

    def __len__(self) -> int:
        return len(self._passages)

    def offer(self, priority: bytes, passage: Passage) -> bool:
        """Takes or drops a passage; False if it is here already."""
        if priority in self._passages:
            return False
        self._passages[priority] = passage
        heapq.heappush(self._heap, _inverted(priority))
        if len(self._heap) > self._capacity:
            del self._passages[_inverted(heapq.heappop(self._heap))]
        return True

    def sorted(self) -> list[tuple[bytes, Passage]]:
        return sorted(self._passages.items(), key=lambda item: item[0])


def _inverted(priority: bytes) -> bytes:
    return bytes(255 - byte for byte in priority)


def _encode(encode: Encode, passage: Passage) -> list[int]:
    try:
        return encode(load_passage(passage))
    except ValueError as error:
        raise ValueError(f"{passage.path}, at byte {passage.offset}: {error}") from None


def _cut(
    ids: list[int], max_seq_len: int, priority: bytes, bos_id: int | None
) -> Int32[np.ndarray, "num_tokens"]:
    """Cuts at a start that the priority decides, so that it follows the seed."""
    start = 0
    if len(ids) > max_seq_len:
        # The last bytes: the first ones are small in whatever was drawn.
        start = int.from_bytes(priority[-8:], "big") % (len(ids) - max_seq_len + 1)
    cut = np.array(ids[start : start + max_seq_len], np.int32)
    if start and bos_id is not None and ids[0] == bos_id:
        cut[0] = bos_id
    return cut

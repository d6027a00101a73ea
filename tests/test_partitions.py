"""Partitions: every image in one part, alike or by label shards, saved and known again."""

import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_folders import make_set
from gradfilter.data import Partition, make_partition
from gradfilter.errors import DataError, SettingsError

LABELS = st.lists(st.integers(0, 6), min_size=12, max_size=80)


@settings(deadline=None)
@given(LABELS, st.integers(1, 4), st.one_of(st.none(), st.integers(1, 3)), st.integers(0, 2**31))
def test_every_image_is_in_exactly_one_part(labels, parts, shards, seed):
    images = make_set(labels)
    partition = make_partition(images, parts, shards=shards, seed=seed)
    assert len(partition.parts) == parts
    assert sorted(index for part in partition.parts for index in part) == list(range(len(labels)))
    assert all(list(part) == sorted(part) for part in partition.parts)
    sizes = [len(part) for part in partition.parts]
    assert max(sizes) - min(sizes) <= (shards or 1)
    assert partition.counts == tuple(images.select(part).counts() for part in partition.parts)
    assert partition.kind == ("iid" if shards is None else "non-iid")
    assert make_partition(images, parts, shards=shards, seed=seed) == partition


@settings(deadline=None)
@given(LABELS, st.integers(1, 4), st.integers(1, 3), st.integers(0, 2**31))
def test_parts_are_made_of_label_sorted_shards(labels, parts, shards, seed):
    """The sorted labels of a part are a union of `shards` runs of the sorted labels of the whole."""
    partition = make_partition(make_set(labels), parts, shards=shards, seed=seed)
    runs = [tuple(run.tolist()) for run in np.array_split(np.sort(labels), parts * shards)]
    unions = {()}
    for part in partition.parts:
        mine = tuple(sorted(labels[index] for index in part))
        unions = {(*left, *more) for left in unions for more in _choices(runs, left, mine, shards)}
        assert unions, "no choice of shards gives this part"


def _choices(runs, taken, wanted, count, start=0):
    """Find the runs, by number, that are not taken and together are the labels wanted."""
    if count == 0:
        return [()] if not wanted else []
    found = []
    for number in range(start, len(runs)):
        rest = _without(wanted, runs[number])
        if number not in taken and rest is not None:
            found += [(number, *more) for more in _choices(runs, taken, rest, count - 1, number + 1)]
    return found


def _without(labels, run):
    left = list(labels)
    for label in run:
        if label not in left:
            return None
        left.remove(label)
    return tuple(left)


def test_one_shard_per_part_gives_each_its_own_classes():
    partition = make_partition(make_set([0, 1, 2, 3] * 10), 2, shards=1, seed=0)
    assert sorted(partition.counts) == [(0, 0, 10, 10), (10, 10, 0, 0)]
    assert partition.kl_divergence() == pytest.approx((math.log(2), math.log(2)))


def test_parts_that_are_alike_are_near_the_whole():
    assert max(make_partition(make_set([0, 1, 2, 3] * 250), 2, seed=0).kl_divergence()) < 0.01


def test_which_images_are_drawn_depends_on_the_seed():
    images = make_set([0, 1, 2, 3] * 25)
    for shards in (None, 3):  # six shards cut through classes
        drawn = {make_partition(images, 2, shards=shards, seed=seed).parts for seed in range(20)}
        assert len(drawn) == 20


def test_kl_divergence_is_that_of_the_histograms():
    """Against the sum written out, with natural logarithms."""
    partition = make_partition(make_set([0] * 30 + [1] * 10 + [2] * 20), 3, shards=2, seed=5)
    counts = np.array(partition.counts, dtype=float)
    whole = counts.sum(0) / counts.sum()
    for part, measured in zip(counts, partition.kl_divergence(), strict=True):
        shares = part / part.sum()
        expected = sum(p * np.log(p / q) for p, q in zip(shares, whole, strict=True) if p > 0)
        assert measured == pytest.approx(expected, abs=1e-12)


def test_a_class_without_images_does_not_count():
    assert make_partition(make_set([0, 0, 1, 1], classes=5), 1, seed=0).kl_divergence() == (0.0,)


@pytest.mark.parametrize(("parts", "shards"), [(0, None), (-1, None), (2, 0), (0, 2), (-1, -1)])
def test_a_partition_has_parts(parts, shards):
    with pytest.raises(SettingsError, match=r"were asked for\. Give 1 or more of both"):
        make_partition(make_set([0, 1, 0, 1]), parts, shards=shards, seed=0)


def test_more_parts_than_images():
    with pytest.raises(SettingsError, match=r"^5 parts are more than the 4 images of colours\. Give fewer"):
        make_partition(make_set([0, 1, 0, 1]), 5, seed=0)
    with pytest.raises(SettingsError, match=r"^2 parts of 3 shards each are more than the 4 images"):
        make_partition(make_set([0, 1, 0, 1]), 2, shards=3, seed=0)


# Saved and loaded


@pytest.mark.parametrize("shards", [None, 2])
def test_a_saved_partition_comes_back(tmp_path, shards):
    images = make_set([0, 1, 2, 2, 1, 0, 0, 1, 2])
    partition = make_partition(images, 2, shards=shards, seed=7)
    partition.save(tmp_path / "parts.json")
    assert Partition.load(tmp_path / "parts.json", images) == partition
    assert json.loads((tmp_path / "parts.json").read_text())["kl_divergence"] == list(partition.kl_divergence())
    assert [path.name for path in tmp_path.iterdir()] == ["parts.json"]


IMAGES = make_set([0, 1, 0, 1])
GOOD = json.loads(json.dumps(vars(make_partition(IMAGES, 2, seed=0))))

UNFIT = {
    "not JSON": ("{", r"is not JSON: .*\. Make the partition anew"),
    "not text": ("\udcff", r"is not JSON"),
    "no partition": ("[1, 2]", r"holds no partition: it needs counts, fingerprint, kind, parts, seed, shards"),
    "a field less": (json.dumps({key: GOOD[key] for key in GOOD.keys() - {"seed"}}), r"holds no partition"),
    "parts of another kind": (json.dumps(GOOD | {"parts": [[0, 1], ["2", "3"]]}), r"holds no partition"),
    "an empty part": (json.dumps(GOOD | {"parts": [[0, 1, 2, 3], []]}), r"holds no partition"),
    "fewer images": (json.dumps(GOOD | {"parts": [[0, 1], [2]]}), r"is for 3 images, but colours has 4\. Make"),
    "an image twice": (json.dumps(GOOD | {"parts": [[0, 1], [1, 2]]}), r"does not have every image in exactly one part"),
    "an image too far": (json.dumps(GOOD | {"parts": [[0, 1], [2, 4]]}), r"does not have every image in exactly one part"),
}


@pytest.mark.parametrize("case", UNFIT)
def test_unfit_files_are_refused(tmp_path, case):
    content, message = UNFIT[case]
    path = tmp_path / "parts.json"
    path.write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(DataError, match=rf"the partition file '{path}' {message}"):
        Partition.load(path, IMAGES)


@pytest.mark.parametrize(
    "images", [make_set([0, 1, 1, 1]), make_set([0, 1, 0, 1], classes=3), make_set([0, 1, 0, 1], name="other")]
)
def test_a_partition_knows_its_images(tmp_path, images):
    make_partition(IMAGES, 2, seed=0).save(tmp_path / "parts.json")
    with pytest.raises(
        DataError, match=rf"was made for other images than {images.name} has now: their names, labels or classes"
    ):
        Partition.load(tmp_path / "parts.json", images)


def test_files_that_cannot_be_read_or_written(tmp_path):
    partition = make_partition(IMAGES, 2, seed=0)
    with pytest.raises(DataError, match=r"cannot read the partition file .*: No such file or directory\. Give a file"):
        Partition.load(tmp_path / "parts.json", IMAGES)
    with pytest.raises(DataError, match=r"cannot write the partition file .*: No such file or directory\. Give a place"):
        partition.save(tmp_path / "nowhere" / "parts.json")


def test_a_failed_save_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "parts.json"
    first = make_partition(IMAGES, 2, seed=0)
    first.save(path)

    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(DataError, match=r"No space left on device"):
        make_partition(IMAGES, 2, seed=1).save(path)
    assert Partition.load(path, IMAGES) == first
    assert [entry.name for entry in tmp_path.iterdir()] == ["parts.json"]

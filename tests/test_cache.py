"""The trunk cache: the same training, found again, never half-written, never one that belongs to something else."""

import dataclasses
import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import gradfilter as gf
from data_folders import make_classes, make_files
from gradfilter.bench.__main__ import main
from gradfilter.data import ImageSet, Transform
from gradfilter.data.images import ArrayReader
from gradfilter.errors import DataError, SettingsError
from gradfilter.models import make_model
from gradfilter.train import cache as cache_module
from gradfilter.train.batches import shuffle
from gradfilter.train.cache import CacheError, count_bytes, from_row, is_close, to_row
from gradfilter.train.feed import Feed
from gradfilter.train.record import Spec
from gradfilter.train.settings import Kernel
from gradfilter.train.watch import Watch, Work
from trunk_programs import EQUAL, Net

COUNT, BATCH = 10, 4
PLAIN = Transform(16, (0.5, 0.5, 0.5), (0.3, 0.3, 0.3))
RANDOM = dataclasses.replace(PLAIN, crop="random", mirror=True)


def make_images(seed=0, count=COUNT):
    pixels = np.random.default_rng(seed).integers(0, 256, (count, 16, 16, 3), dtype=np.uint8)
    names = tuple(f"noise/{i}" for i in range(count))
    return ImageSet("noise", ("a", "b", "c", "d", "e"), tuple(i % 5 for i in range(count)), names, ArrayReader(pixels))


def make_net(patch=2, kernel: Kernel = "lift", batch_norm="eval"):
    net = make_model("cifar-resnet20", classes=5)
    plan = gf.Plan.last(2, gf.Backward(patch=patch, kernel=kernel), batch_norm=batch_norm)
    return gf.apply_(net.to(memory_format=torch.channels_last), plan)  # type: ignore[call-overload]


def make_feed(model=None, images=None, transform=PLAIN, views=None, seed=0, training=True):
    model = model or make_net()
    return Feed(images or make_images(), transform, model, torch.device("cpu"), BATCH, views, seed, 0, training)


def keep(feed, folder, place="disk"):
    """Fill the cache; return what was told."""
    told: list[str] = []
    feed.keep(place, folder, Tell(told.append))
    return told


class Tell(Watch):
    """Passes on what it is told."""

    def __init__(self, tell: Callable[[str], object]) -> None:
        self.pass_on = tell
        self.works: list[Work] = []

    def tell(self, text: str) -> None:
        self.pass_on(text)

    def work(self, work: Work) -> None:
        self.works.append(work)


def train(feed, epochs=3):
    """Train for some epochs; return weights and statistics."""
    model = feed.model.train()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05, momentum=0.9)
    for epoch in range(epochs):
        for labels, forward in feed.run(shuffle(len(feed.images), 0, epoch), epoch):
            F.cross_entropy(forward(), labels).backward()
            optimizer.step()
            optimizer.zero_grad()
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("batch_norm", ["eval", "train"])
@pytest.mark.parametrize(("transform", "views"), [(PLAIN, None), (RANDOM, 2)], ids=["plain", "two views"])
def test_training_is_the_same(tmp_path, transform, views, batch_norm):
    results = {}
    for place in ("off", "memory", "disk"):
        feed = make_feed(make_net(batch_norm=batch_norm), transform=transform, views=views)
        if place != "off":
            keep(feed, tmp_path, place)
        results[place] = train(feed)
    start = make_net().state_dict()
    for name, weight in results["off"].items():
        assert torch.equal(results["memory"][name], results["disk"][name]), name
        torch.testing.assert_close(results["memory"][name], weight, rtol=1e-4, atol=1e-5, msg=name)
    assert not torch.equal(results["off"]["classifier.weight"], start["classifier.weight"])


def test_views_differ(tmp_path):
    feed = make_feed(transform=RANDOM, views=2)
    keep(feed, tmp_path, "memory")
    assert feed.cache is not None
    (column,) = feed.cache.columns
    assert len(column) == 2 * COUNT
    assert not any(torch.equal(column[i], column[COUNT + i]) for i in range(COUNT))


def test_held_out_images_are_judged_the_same(tmp_path):
    whole, cached = (make_feed(training=False) for _ in range(2))
    keep(cached, tmp_path)
    for feed in (whole, cached):
        feed.model.eval()
    with torch.no_grad():
        pairs = zip(whole.run(torch.arange(COUNT), 0), cached.run(torch.arange(COUNT), 0), strict=True)
        for (labels, forward), (same_labels, from_cut) in pairs:
            assert torch.equal(labels, same_labels)
            torch.testing.assert_close(from_cut(), forward(), rtol=1e-4, atol=1e-5)


def test_the_model_is_left_as_it_was(tmp_path):
    feed = make_feed(make_net(batch_norm="train"))
    before = {name: tensor.clone() for name, tensor in feed.model.state_dict().items()}
    modes, drawn = [module.training for module in feed.model.modules()], torch.get_rng_state()
    keep(feed, tmp_path)
    assert all(torch.equal(tensor, before[name]) for name, tensor in feed.model.state_dict().items())
    assert [module.training for module in feed.model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), drawn)
    assert all(p.grad is None for p in feed.model.parameters())


# What names a cache.


def find_key(folder, **options):
    keep(make_feed(**options), folder)
    (header,) = folder.glob("*.json")
    key = header.stem
    shutil.rmtree(folder)
    return key


def change(model, name, by=1.0):
    with torch.no_grad():
        parameter = model.get_parameter(name)
        parameter[(-1,) * parameter.dim()] += by
    return model


def with_buffer_changed(model):
    model.get_buffer("bn1.running_mean")[0] += 1
    return model


def with_other_layers():
    return gf.apply_(make_model("cifar-resnet20", classes=5), gf.Plan.last(3, gf.Backward(patch=2)))


def with_other_pixel(images):
    pixels = images.read.pixels.copy()
    pixels[-1, -1, -1, -1] ^= 1
    return dataclasses.replace(images, read=ArrayReader(pixels))


def test_a_key_changes_with_all_that_the_cut_depends_on(tmp_path):
    different = [
        {},
        {"model": change(make_net(), "conv1.weight", 1e-6)},
        {"model": with_buffer_changed(make_net())},
        {"model": with_other_layers()},
        {"images": with_other_pixel(make_images())},
        {"images": make_images(count=COUNT - 1)},
        {"transform": dataclasses.replace(PLAIN, mean=(0.5, 0.5, 0.4))},
        {"transform": dataclasses.replace(PLAIN, resolution=20)},
        {"transform": RANDOM, "views": 1},
        {"transform": RANDOM, "views": 2},
        {"transform": RANDOM, "views": 2, "seed": 1},
        {"transform": dataclasses.replace(RANDOM, mirror=False), "views": 2},
    ]
    keys = [find_key(tmp_path / "cache", **options) for options in different]
    assert len(set(keys)) == len(different)


def test_a_key_does_not_change_with_what_is_trained_and_how(tmp_path):
    same = [make_net(), make_net(patch=4), make_net(kernel="lumped"), change(make_net(), "classifier.weight"), make_net()]
    change(same[-1], next(name for name, p in same[-1].named_parameters() if p.requires_grad))
    assert len({find_key(tmp_path / "cache", model=model) for model in same}) == 1


@pytest.mark.parametrize("name", ["standardised_weights", "position_resized_to_the_map"])
def test_a_key_knows_weights_that_are_used_through_others(tmp_path, name):
    nets = [Net(EQUAL[name]), change(Net(EQUAL[name]), "b.weight"), change(Net(EQUAL[name]), "position")]
    keys = [find_key(tmp_path / "cache", model=net) for net in nets]
    assert (keys[0] != keys[1], keys[0] != keys[2]) == (name == "standardised_weights", name != "standardised_weights")


def test_a_key_knows_numbers_and_the_order_of_the_cut(tmp_path):
    def scaled(factor):
        return lambda net, x: net.end(net.t(net.a(x) * factor))

    def crossed(first, second):
        def program(net, x):
            maps = net.a(x), net.b(net.a(x))
            return net.end(net.t(maps[first]) + net.u(maps[second]))

        return program

    programs = [scaled(2.0), scaled(2.5), crossed(0, 1), crossed(1, 0)]
    assert len({find_key(tmp_path / "cache", model=Net(program)) for program in programs}) == len(programs)


# Files.


def forbid(*_):
    raise AssertionError("the cache was computed again")


def test_a_cache_is_found_again(tmp_path, monkeypatch):
    first = train(make_cached(tmp_path))
    monkeypatch.setattr(cache_module, "fill", forbid)
    feed = make_feed()
    (told,) = keep(feed, tmp_path)
    assert "found on disk" in told
    second = train(feed)
    assert all(torch.equal(first[name], second[name]) for name in first)


def make_cached(folder, place="disk"):
    feed = make_feed()
    keep(feed, folder, place)
    return feed


def test_the_size_is_told_before_anything_is_written(tmp_path):
    feed, seen = make_feed(), []
    feed.keep("disk", tmp_path / "cache", Tell(lambda text: seen.append((text, list(tmp_path.iterdir())))))
    ((text, files),) = seen
    size = sum(file.stat().st_size for file in tmp_path.glob("cache/*.bin"))
    assert files == []
    assert size == count_bytes(feed.records[BATCH].cut, COUNT)
    assert f"{COUNT} rows of {size / COUNT / 1e3:.1f} kB, {size / 1e6:.1f} MB on disk" in text


def test_how_far_the_filling_is_is_told(tmp_path):
    for expected in (range(BATCH, COUNT + BATCH, BATCH), ()):  # the second time it is found
        watch = Tell(lambda text: None)
        make_feed().keep("disk", tmp_path, watch)
        assert [(work.what, work.done, work.total) for work in watch.works] == [
            ("trunk cache", min(done, COUNT), COUNT) for done in expected
        ]
        assert all(work.seconds_left >= 0 for work in watch.works)


@pytest.mark.filterwarnings("ignore::gradfilter.errors.TrunkWarning")
def test_a_trunk_in_bfloat16_is_not_cached(tmp_path):
    net = gf.apply_(make_net(), gf.Plan.last(2, gf.Backward(patch=2), trunk="bfloat16"))
    with pytest.raises(SettingsError, match=r"--cache disk .* trunk in bfloat16.* Use --trunk float32, or --cache off"):
        keep(make_feed(net), tmp_path / "cache")
    assert keep(make_feed(gf.freeze_(net, gf.Plan.last(2, trunk="bfloat16"))), tmp_path / "cache")


@pytest.mark.parametrize("place", ["memory", "disk"])
def test_a_cache_that_does_not_fit_is_refused(tmp_path, monkeypatch, place):
    monkeypatch.setattr(cache_module, "find_free_memory", lambda: 1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(2000, 1000, 1000))  # type: ignore[attr-defined]
    feed = make_feed()
    with pytest.raises(SettingsError, match=r"would take 0 MB, and there are 0 MB .* Use fewer --views, --cache (disk|memory)"):
        feed.keep(place, tmp_path / "cache", Watch())
    assert list(tmp_path.glob("cache/*")) == []
    assert feed.cache is None


def test_free_memory_is_a_number_of_bytes():
    assert 10e6 < cache_module.find_free_memory() < 1e15


def fail_with(error):
    def fail(*_):
        raise error

    return fail


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(CacheError, match=r"cannot be written to '.*file/cache'.*--cache_folder"):
        keep(make_feed(), tmp_path / "file" / "cache")


@pytest.mark.parametrize("function", ["posix_fallocate", "fsync", "replace"])
def test_a_disk_that_fills_up_leaves_nothing(tmp_path, monkeypatch, function):
    monkeypatch.setattr(os, function, fail_with(OSError(errno.ENOSPC, "No space left on device")))
    feed = make_feed()
    with pytest.raises(CacheError, match=rf"'{tmp_path}': No space left on device\. Free some space"):
        keep(feed, tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert feed.cache is None


@pytest.mark.parametrize("error", [KeyboardInterrupt(), DataError("photo.jpg: it is damaged")], ids=["Ctrl-C", "bad image"])
def test_a_cache_that_is_not_finished_leaves_nothing(tmp_path, error):
    images = make_images()
    read = images.read

    def read_most(index):
        if index == COUNT - 1:
            raise error
        return read(index)

    with pytest.raises(type(error)):
        keep(make_feed(images=dataclasses.replace(images, read=Reader(read, read_most))), tmp_path)
    assert list(tmp_path.iterdir()) == []


class Reader:
    """A reader that fails."""

    def __init__(self, whole, read):
        self.identify, self.read = whole.identify, read

    def __call__(self, index):
        return self.read(index)


def truncate(folder):
    (file,) = folder.glob("*.bin")
    os.truncate(file, file.stat().st_size // 2)


def replace_by_zeros(folder):
    (file,) = folder.glob("*.bin")
    file.write_bytes(bytes(file.stat().st_size))


def remove_file(folder):
    next(folder.glob("*.bin")).unlink()


def damage_header(folder):
    next(folder.glob("*.json")).write_text('{"key": ')


def change_header(folder):
    header = next(folder.glob("*.json"))
    header.write_text(json.dumps({**json.loads(header.read_text()), "rows": 3}))


def leave_drafts_only(folder):
    """As a process does that was killed while it wrote."""
    for file in list(folder.iterdir()):
        if file.suffix == ".bin":
            file.rename(folder / f".{file.name}.4711.tmp")
        else:
            file.unlink()


DAMAGE = [truncate, replace_by_zeros, remove_file, damage_header, change_header, leave_drafts_only]


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda function: function.__name__)
def test_a_cache_that_is_not_whole_is_not_used(tmp_path, damage):
    whole = make_cached(tmp_path).cache
    assert whole is not None
    kept = [column.clone() for column in whole.columns]
    damage(tmp_path)
    feed = make_feed()
    told = keep(feed, tmp_path)
    assert "found on disk" not in " ".join(told)
    assert feed.cache is not None
    assert all(torch.equal(x, y) for x, y in zip(kept, feed.cache.columns, strict=True))
    assert ("written anew" in told[0]) == (damage is replace_by_zeros)


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="the system does not tell what is mapped")
def test_files_are_mapped_and_never_written_to(tmp_path):
    feed = make_feed(Net(EQUAL["first_trained_function_in_place"]))
    keep(feed, tmp_path)
    (file,) = tmp_path.glob("*.bin")
    before = file.read_bytes()
    assert feed.cache is not None
    (column,) = feed.cache.columns
    assert str(file) in Path("/proc/self/maps").read_text()
    (x,) = feed.cache.read(torch.tensor([3, 1]))
    assert x.untyped_storage().nbytes() == 2 * column[0].numel() * 4  # the rows of the batch alone
    first = train(feed, 2)
    column[0] = 0  # a private copy
    assert file.read_bytes() == before
    again = make_feed(Net(EQUAL["first_trained_function_in_place"]))
    assert "found" in keep(again, tmp_path)[0]
    second = train(again, 2)
    assert all(torch.equal(first[name], second[name]) for name in first)


# The benchmark.


def test_the_benchmark_prints_a_row_per_place(tmp_path, capsys):
    make_files(tmp_path / "data", make_classes(a=10, b=10))
    args = ["cache", "--data", str(tmp_path / "data"), "--model", "cifar-resnet20", "--weights", "random", "--plan", "last2"]
    assert main(["--save", str(tmp_path), *args, "--pixels", "16", "--images", "8", "--batch", "4", "--rounds", "1"]) == 0
    (file,) = tmp_path.glob("*.json")
    rows = {row["cache"]: row for row in json.loads(file.read_text())["rows"]}
    assert list(rows) == ["off", "memory", "disk"]
    assert rows["off"]["epoch / off"] == "1.00"
    assert rows["memory"]["cached MB"] == rows["disk"]["cached MB"] != ""
    assert "| disk " in capsys.readouterr().out
    assert str(tmp_path) not in file.read_text()


# Refusals.


def test_a_trunk_that_cannot_be_cached_is_refused_with_the_remedy(tmp_path):
    net = Net(lambda net, x: net.end(net.t(net.a(x) - net.a(x).mean(0))))
    with pytest.raises(
        SettingsError, match=r"^the frozen layers of this model cannot be cached: they mix .*\. Use --cache off\.$"
    ):
        keep(make_feed(net), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_last_batch_is_checked_before_anything_is_written(tmp_path):
    net = Net(lambda net, x: net.end(net.t(net.a(x) * (1 if len(x) == BATCH else 2))))
    with pytest.raises(SettingsError, match="in a batch of 2, the last one of an epoch"):
        keep(make_feed(net), tmp_path)
    net = Net(lambda net, x: net.end(net.t(net.a(x)) + (net.a(x) if len(x) == BATCH else net.stem(x))))
    with pytest.raises(SettingsError, match="cannot be cached"):
        keep(make_feed(net), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_model_that_changes_its_mind_in_training_is_refused(tmp_path):
    net = Net(lambda net, x: net.end(net.t(net.a(x)) if net.turn < 5 else net.t(net.a(x)).relu()))
    feed = make_feed(net)
    keep(feed, tmp_path)
    net.turn = 5
    with pytest.raises(SettingsError, match=r"the model calls .*relu where .* Use --cache off"):
        train(feed)


# Rows.


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64])
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 3, 1), (1, 2, 3, 0), (2, 0, 1, 3)])
def test_rows_keep_values_and_layout(order, dtype):
    x = torch.empty_permuted((5, 3, 4, 2), order, dtype=dtype)
    x.copy_(torch.randint(0, 2, x.shape, generator=torch.Generator().manual_seed(0)))
    spec = Spec.of(x)
    assert spec.order == order
    rows = to_row(x, spec)
    assert rows[1].is_contiguous()
    result = from_row(rows.clone(), spec)
    assert torch.equal(result, x)
    assert result.stride() == x.stride()


def test_what_counts_as_the_same():
    x = torch.tensor([1.0, -2.0, float("inf"), float("nan")])
    assert is_close(x, x + 1e-6)
    assert not is_close(x, x + torch.tensor([0.01, 0, 0, 0]))
    assert not is_close(x, x.flip(0))
    assert not is_close(x, x.double())
    assert not is_close(x, x[:3])
    assert is_close(torch.zeros(0), torch.zeros(0))
    assert is_close(torch.tensor([True]), torch.tensor([True]))
    assert not is_close(torch.tensor([3]), torch.tensor([4]))

"""All that can be said about a training run: one frozen dataclass, of which the flags of `gradfilter train` are made."""

from __future__ import annotations

import dataclasses
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from gradfilter.data.frames import Evaluate
from gradfilter.data.sets import Task, find_sets
from gradfilter.data.transforms import Augment
from gradfilter.errors import BudgetError, PlanError, SettingsError
from gradfilter.keep import parse_keep
from gradfilter.plan import Plan, is_plan_file
from gradfilter.train.cache import Place
from gradfilter.units import parse_amount

Optimizer = Literal["sgd", "adam", "adamw"]
Schedule = Literal["cosine", "poly", "constant"]
ClassWeights = Literal["none", "balanced"]
Kernel = Literal["lift", "lumped"]
TrunkType = Literal["float32", "bfloat16"]
BatchNorm = Literal["eval", "train", "frozen"]
Precision = Literal["32-true", "bf16-mixed"]
Triple = tuple[float, float, float]

BATCH_NORMS: dict[Task, BatchNorm] = {"classify": "eval", "segment": "train"}
"""What batch norms do where nothing is said. Behind a pretrained encoder is a fresh decoder: its norms have no statistics."""

MAY_CHANGE = frozenset(
    "resume overwrite out preset strict download cache cache_folder root device workers threads save_every measure beside "
    "tensorboard".split()
)
"""Settings that a resumed run may have otherwise than the run it goes on with: they do not change what is computed."""


@dataclass(frozen=True)
class Settings:
    """Say what to train, on what, and how.

    Attributes:
        task: What to learn: a label for each image, or for each pixel.
        data: A folder of images, a folder per class, or for --task segment one with images and masks; or the name of a known
            data set.
        root: Where named data sets lie.
        download: Fetch a named data set that is not there.
        strict: Stop at images that cannot be read, instead of skipping them.
        val_share: Share of the images to hold out where the data come without a split.
        limit: Train on so many images only, drawn evenly from all classes.
        parts: Cut the training images into so many parts, and train on one.
        shards: Make the parts non-iid, of so many label-sorted shards each.
        part: Which part to train on, from 0.
        partition: A file to keep the partition in: made where it is missing, read where it is there.
        model: A name that "gradfilter models" lists, or one of timm or torchvision, or module:function.
        encoder: What is in front of the decoder of a model for --task segment; resnet18 where not given.
        weights: "pretrained", "random", or a weight file (safetensors, or .pth).
        resolution: Side of the images in pixels; the model's own where not given.
        mean: Subtracted per channel; the model's own where not given.
        std: Divided by per channel; the model's own where not given.
        augment: What is done to training images: nothing, mirrored at random, or random crops too.
        views: See each image in so many augmented views, in turn, instead of a new one each epoch.
        plan: Which layers to train: "all", "head", "decoder", "last4", or a plan in a YAML file.
        patch: Side of a patch in pixels of each layer's map; overrides the plan's.
        grid: Patches per side at every resolution (4 where nothing is said); overrides the plan's.
        kernel: The coarse kernel, "lift" where nothing is said; overrides the plan's.
        keep: How the inputs of trained layers are held until backward: int8, hosvd:0.8, subspace:64KB, ...; overrides the
            plan's.
        memory: Choose layers and patches for the most useful gradient while autograd holds at most this, e.g. 64MB.
        exact: Train the plan's layers with torch's own, exact backward.
        batch_norm: Batch norms of trained layers: statistics kept ("eval", the default), moving ("train", the default of
            --task segment, whose decoder is fresh), all frozen.
        trunk: What frozen layers before the first trained one compute in ("float32" where nothing is said); overrides the
            plan's.
        epochs: How often to see every training image.
        batch: Images per step.
        optimizer: The optimizer.
        lr: Learning rate, at its highest.
        momentum: Momentum of SGD.
        weight_decay: Weight decay.
        schedule: Let the learning rate fall along a cosine, or as a power of what is left (0.9), or stay.
        warmup: Epochs in which the learning rate rises from nothing.
        clip: Largest norm of the gradient, all parameters together; 0 for no limit.
        label_smoothing: Share of the target spread over all classes.
        auxiliary: Weight of the loss of an auxiliary head in the middle of the encoder, for --task segment; 0 for none. The
            papers' recipes have 0.4.
        class_weights: Let classes of fewer pixels count for more in the loss of --task segment.
        seed: Of everything that is drawn: split, order, augmentation, new weights, dropout.
        cache: Keep what the frozen layers make of each image.
        cache_folder: Where a cache on disk is kept, to share it between runs; in the folder of the run where not given.
        out: Folder of the run; made from data, model and plan where not given.
        resume: Go on with the run in the folder.
        overwrite: Replace the run in the folder.
        evaluate: Judge --task segment on whole images, scaled to --resolution, or through windows of that side at the images'
            own size; pixels are counted at the size of their mask in either case.
        val_every: Judge the model on held-out images every so many epochs, and after the last.
        save_every: Write a checkpoint every so many steps too, not only after each epoch.
        device: Where to train, "auto" for the best there is.
        precision: Of the numbers.
        workers: Processes that load images; 0 for none besides the training itself.
        threads: Threads of torch; all cores where not given.
        measure: Measure memory and time beside exact backprop at the end.
        tensorboard: Write logs for TensorBoard too.
        beside: Folder of an earlier run, whose accuracy the report shows beside this one's.
        preset: Start from a named recipe; what is given besides overrides it.
    """

    task: Task = "classify"
    data: str = "digits"
    root: str | None = None
    download: bool = False
    strict: bool = False
    val_share: float = 0.2
    limit: int | None = None
    parts: int = 1
    shards: int | None = None
    part: int = 0
    partition: str | None = None
    model: str = "efficientnet-lite0"
    encoder: str | None = None
    weights: str = "pretrained"
    resolution: int | None = None
    mean: Triple | None = None
    std: Triple | None = None
    augment: Augment = "standard"
    views: int | None = None
    plan: str = "all"
    patch: int | None = None
    grid: int | None = None
    kernel: Kernel | None = None
    keep: str | None = None
    memory: str | None = None
    exact: bool = False
    batch_norm: BatchNorm | None = None
    trunk: TrunkType | None = None
    epochs: int = 10
    batch: int = 32
    optimizer: Optimizer = "sgd"
    lr: float = 0.01
    momentum: float = 0.9
    weight_decay: float = 1e-4
    schedule: Schedule = "cosine"
    warmup: float = 0.0
    clip: float = 2.0
    label_smoothing: float = 0.0
    auxiliary: float = 0.0
    class_weights: ClassWeights = "none"
    seed: int = 0
    cache: Place = "off"
    cache_folder: str | None = None
    out: str | None = None
    resume: bool = False
    overwrite: bool = False
    evaluate: Evaluate = "whole"
    val_every: int = 1
    save_every: int | None = None
    device: str = "auto"
    precision: Precision = "32-true"
    workers: int = 0
    threads: int | None = None
    measure: bool = True
    tensorboard: bool = False
    beside: str | None = None
    preset: str | None = None

    def __post_init__(self) -> None:
        """Check what can be checked without data and model; all at once."""
        wrong = [*self.find_out_of_range(), *self.find_unknown()]
        if self.patch is not None and self.grid is not None:
            wrong.append(f"--patch {self.patch} and --grid {self.grid} both set the resolution of the gradient: give one")
        if self.exact and self.trunk == "bfloat16":
            wrong.append("--trunk bfloat16 is for a filtered backward, but --exact leaves everything to torch: give one")
        wrong += [*self.find_keep_clashes(), *self.find_memory_clashes(), *self.find_task_clashes()]
        if self.part >= self.parts and self.partition is None:
            wrong.append(f"--part {self.part} is none of the {self.parts} parts, which count from 0")
        if self.shards is not None and self.parts == 1:
            wrong.append("--shards cuts parts out of shards, but --parts is 1: say how many parts")
        if self.resume and self.overwrite:
            wrong.append("--resume goes on with the run that --overwrite replaces: give one")
        if self.cache != "off" and self.augment != "none" and self.views is None:
            wrong.append(
                f"--cache {self.cache} keeps what frozen layers make of an image, but --augment {self.augment} makes a new one "
                "each epoch: give --views 4 for four views of each in turn, or --augment none"
            )
        if wrong:
            raise SettingsError("; ".join(wrong) + ".")

    def find_out_of_range(self) -> list[str]:
        """List the numbers that cannot be."""
        least = {
            "epochs": 1,
            "batch": 1,
            "parts": 1,
            "part": 0,
            "shards": 1,
            "views": 1,
            "limit": 2,
            "save_every": 1,
            "val_every": 1,
        }
        least |= {"workers": 0, "threads": 1, "seed": 0, "resolution": 1, "patch": 1, "grid": 1}
        least |= {"lr": 0, "momentum": 0, "weight_decay": 0, "warmup": 0, "clip": 0, "label_smoothing": 0, "auxiliary": 0}
        values = {name: value for name in least if (value := getattr(self, name)) is not None}
        wrong = [
            f"--{name} is {value}, but must be at least {least[name]}"
            for name, value in values.items()
            if not value >= least[name]
        ]
        wrong += [f"--{name} is {value}, which is no finite number" for name, value in values.items() if math.isinf(value)]
        if not 0 < self.val_share < 1:
            wrong.append(f"--val_share is {self.val_share}, but must be between 0 and 1")
        if self.label_smoothing >= 1:
            wrong.append(f"--label_smoothing is {self.label_smoothing}, but must be below 1")
        if self.warmup > self.epochs:
            wrong.append(f"--warmup is {self.warmup} epochs, but there are --epochs {self.epochs}")
        if self.mean is not None and not all(map(math.isfinite, self.mean)):
            wrong.append(f"--mean is {self.mean}, but three finite numbers")
        if self.std is not None and not all(0 < value < math.inf for value in self.std):
            wrong.append(f"--std is {self.std}, but three finite numbers above 0")
        return wrong

    def find_keep_clashes(self) -> list[str]:
        """List what is wrong with the keep."""
        if self.keep is None:
            return []
        try:
            parse_keep(self.keep)
        except PlanError as error:
            return [f"--keep: {str(error).removesuffix('.')}"]
        clash = f"--keep {self.keep} says how inputs are held, but --exact leaves that to torch's own backward: give one"
        return [clash] if self.exact else []

    def find_task_clashes(self) -> list[str]:
        """List what is for another task than is given."""
        if self.task == "classify":
            usual = {"class_weights": "none", "evaluate": "whole", "auxiliary": 0.0}
            given = {name: value for name in usual if (value := getattr(self, name)) != usual[name]}
            return [f"--{name} {value} is for --task segment: leave it out" for name, value in given.items()]
        only = {"--parts": self.parts > 1, "--partition": self.partition is not None}
        why = "a partition deals out images by their one class, and masks have many"
        return [f"{flag} is for --task classify ({why}): leave it out" for flag, given in only.items() if given]

    def find_memory_clashes(self) -> list[str]:
        """List what cannot stand beside a budget of memory, which chooses the plan itself."""
        if self.memory is None:
            return []
        try:
            parse_amount("memory", self.memory)
        except BudgetError as error:
            return [f"--{str(error).removesuffix('.')}"]
        both = self.find_plan_flags()
        return [f"--memory {self.memory} chooses layers, patches and keeps itself: drop {', '.join(both)}"] if both else []

    def find_plan_flags(self) -> list[str]:
        """List the flags that are given and choose a plan."""
        given = {"--patch": self.patch, "--grid": self.grid, "--kernel": self.kernel, "--keep": self.keep}
        given |= {"--exact": self.exact or None, "--plan": None if self.plan == "all" else self.plan}
        return [flag for flag, value in given.items() if value is not None]

    def find_unknown(self) -> list[str]:
        """List the words that are not among the choices."""
        choices = {"augment": Augment, "optimizer": Optimizer, "schedule": Schedule, "cache": Place, "precision": Precision}
        choices |= {"task": Task, "class_weights": ClassWeights, "evaluate": Evaluate}
        optional = {"kernel": Kernel, "batch_norm": BatchNorm, "trunk": TrunkType}
        choices |= {name: kind for name, kind in optional.items() if getattr(self, name) is not None}
        return [
            f"--{name} is {value!r}, but must be one of {', '.join(get_args(kind))}"
            for name, kind in choices.items()
            if (value := getattr(self, name)) not in get_args(kind)
        ]

    @property
    def folder(self) -> Path:
        """Return the folder of the run."""
        if self.out is not None:
            return Path(self.out).expanduser()
        plan = Path(self.plan).stem.replace(" ", "") if self.memory is None else self.memory.replace(" ", "")
        model = "-".join(word.replace("/", "-").replace(":", "-") for word in (self.model, self.encoder) if word)
        words = [Path(self.data).name or "data", model, plan, self.describe_backward()]
        return Path("runs") / "-".join(word for word in words if word)

    def describe_backward(self) -> str:
        """Return the overrides of the plan in one word, which can be part of a file's name."""
        if self.exact:
            return "exact"
        size = f"patch{self.patch}" if self.patch is not None else f"grid{self.grid}" if self.grid is not None else ""
        size += "lumped" if self.kernel == "lumped" else ""
        return "-".join(word for word in (size, make_word(self.keep or "")) if word)

    def make_plan(self) -> Plan:
        """Return the plan: a named one or a file's, with the overrides."""
        plan = Plan.parse(self.plan).override(patch=self.patch, grid=self.grid, kernel=self.kernel, keep=self.keep)
        batch_norm = self.batch_norm if is_plan_file(self.plan) else self.choose_batch_norm()
        return dataclasses.replace(plan, batch_norm=batch_norm or plan.batch_norm, trunk=self.trunk or plan.trunk)

    def choose_batch_norm(self) -> BatchNorm:
        """Return what batch norms of trained layers do, where no plan file says it: as given, or as the task has it."""
        return self.batch_norm or BATCH_NORMS[self.task]

    def make_absolute(self) -> Settings:
        """Return the settings with absolute paths, the folder's among them: they mean the same from everywhere."""
        return dataclasses.replace(self, **find_absolute({**self.to_dict(), "out": str(self.folder)}))

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as plain data."""
        return {key: list(value) if isinstance(value, tuple) else value for key, value in dataclasses.asdict(self).items()}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Settings:
        """Return the settings from plain data, as `to_dict` gives them or a YAML file has them."""
        unknown = data.keys() - {field.name for field in dataclasses.fields(cls)}
        if unknown:
            raise SettingsError(
                f"there is no setting {', '.join(map(repr, sorted(unknown)))}. 'gradfilter train --help' lists them."
            )
        values: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in data.items()}
        return cls(**values)

    def find_changes(self, before: dict[str, Any]) -> list[str]:
        """List the settings that differ from those of an earlier run, as far as they change what is computed.

        A setting that did not exist when that run was made was as its default is.
        """
        now = self.make_absolute().to_dict()
        before = {**Settings().to_dict(), **before}
        before |= find_absolute(before)
        return [
            f"--{key} was {before[key]}, now {now[key]}" for key in now if key not in MAY_CHANGE and before[key] != now[key]
        ]


def make_word(keep: str) -> str:
    """Return a keep as a part of a file's name, another one for each: "hosvd0.8", "int8-64", "fixed0.9-4"."""
    text = re.sub(r"(?<=[a-z]):", "", keep.lower().replace(" ", ""))
    return re.sub(r"[^\w.]+", "-", text)


def find_absolute(values: Mapping[str, Any]) -> dict[str, str]:
    """Return those of the settings that are paths, as absolute ones.

    What names no path, such as a known data set or "pretrained", is left out; so is what is not there, for errors to name.
    """
    words = {"data": (*find_sets(values.get("task", "classify")), ""), "weights": ("pretrained", "random", "")}
    given = {name: values.get(name) for name in ("root", "partition", "cache_folder", "beside", "out", "plan", *words)}
    paths = {name: os.path.abspath(os.path.expanduser(text)) for name, text in given.items() if text is not None}
    if not is_plan_file(values.get("plan", "")):
        paths.pop("plan", None)
    for name, known in words.items():
        if given[name] in known or not os.path.exists(paths.get(name, "")):
            paths.pop(name, None)
    return paths

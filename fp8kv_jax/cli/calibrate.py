"""`fp8kv calibrate`: runs representative text through a model and writes its scales."""

import contextlib
import dataclasses
import os
import sys
import time
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from fp8kv_jax.calibration import CalibrationConfig
from fp8kv_jax.cli import calibrate_options as flags
from fp8kv_jax.cli import options
from fp8kv_jax.cli.calibrate_report import Done, report
from fp8kv_jax.cli.calibrate_screen import CalibrationScreen
from fp8kv_jax.cli.errors import UserError, checking_input, print_warning
from fp8kv_jax.cli.identity import identify
from fp8kv_jax.cli.model import choose_dtype, load, make_encoder
from fp8kv_jax.scales import processes
from fp8kv_jax.scales.artifact import (
    is_artifact,
    read_artifact,
    write_artifact,
)
from fp8kv_jax.scales.corpus import JSON_LINES_SUFFIXES, DataSource
from fp8kv_jax.scales.identity import ModelIdentity
from fp8kv_jax.scales.manifest import Manifest, make_manifest
from fp8kv_jax.scales.offline import Compiling, Observed, OfflineCalibration
from fp8kv_jax.scales.running_state import StateStore, fingerprint
from fp8kv_jax.scales.sample_plan import (
    SamplePlan,
    describe_data,
    describe_envelope,
    make_plan,
)
from fp8kv_jax.scales.scale_set import ScaleSet
from fp8kv_jax.scales.statistics import AmaxState, init_state, make_scales

if TYPE_CHECKING:
    from models.loading import LoadedModel


def calibrate(
    data: flags.Data,
    out: flags.Out,
    model: options.Model = None,
    dtype: options.Dtype = None,
    num_samples: flags.NumSamples = 512,
    max_seq_len: flags.MaxSeqLen = 2048,
    seed: flags.Seed = 0,
    granularity: flags.Granularity = options.ScaleGranularity.TENSOR,
    headroom: flags.Headroom = 2.0,
    rule: flags.ScaleRule = flags.Rule.AMAX,
    kv_high_precision_layers: options.HighPrecisionLayers = "none",
    batch_size: flags.BatchSize = 1,
    resume: flags.Resume = True,
    work_dir: flags.WorkDir = None,
    save_every: flags.SaveEvery = 8,
    overwrite: flags.Overwrite = False,
    coordinator: flags.Coordinator = None,
    num_processes: flags.NumProcesses = 1,
    process_id: flags.ProcessId = None,
    as_json: options.Json = False,
) -> None:
    """Runs representative text through a model and writes its FP8 scales.

    The result, an artifact, is for `fp8kv generate --fp8-kv-scales DIR`. It does not
    depend on how many devices and processes share the work.
    """
    with checking_input():
        config = CalibrationConfig(headroom=headroom, granularity=granularity.value)
    request = _Request(
        sources=[parse_source(text) for text in data],
        out=out,
        model=model,
        dtype=dtype,
        num_samples=num_samples,
        max_seq_len=max_seq_len,
        seed=seed,
        config=config,
        rule=rule,
        high_precision_layers=options.parse_layers(kv_high_precision_layers),
        batch_size=batch_size,
        resume=resume,
        work_dir=work_dir or out.with_name(f"{out.name}.running"),
        keep_work_dir=work_dir is not None,
        save_every=save_every,
        overwrite=overwrite,
    )
    _check_out(request)
    with checking_input():
        processes.join(coordinator, num_processes, process_id)
    with _quiet_stdout(num_processes > 1):
        done = _run(request)
    if done is not None:
        report(request.out, done, as_json=as_json)


@dataclass(frozen=True, kw_only=True)
class _Request:
    """A command line, checked as far as that goes without a model."""

    sources: list[DataSource]
    out: Path
    model: Path | None
    dtype: options.ComputeDtype | None
    num_samples: int
    max_seq_len: int
    seed: int
    config: CalibrationConfig
    rule: flags.Rule
    high_precision_layers: tuple[int, ...]
    batch_size: int
    resume: bool
    work_dir: Path
    keep_work_dir: bool
    save_every: int
    overwrite: bool

    def __post_init__(self) -> None:
        options.check_least(
            1,
            num_samples=self.num_samples,
            max_seq_len=self.max_seq_len,
            batch_size=self.batch_size,
            save_every=self.save_every,
        )


def parse_source(text: str) -> DataSource:
    """Reads `NAME=PATH`, or a path whose class is chat, text or code by its kind.

    A path that exists as it stands is a path, with "=" in it or not.
    """
    name, separator, rest = text.partition("=")
    if not separator or Path(text).exists():
        name, rest = "", text
    path = Path(rest)
    if not rest or not path.exists():
        raise UserError(f"Expected --data to name a file or a folder, got {text!r}.")
    if separator and not Path(text).exists() and not name:
        raise UserError(f"Expected a name before the = of --data, got {text!r}.")
    if not name:
        is_json = path.suffix.lower() in JSON_LINES_SUFFIXES
        name = "code" if path.is_dir() else "chat" if is_json else "text"
    return DataSource(class_name=name, path=path)


def _check_out(request: _Request) -> None:
    """Says at once what would otherwise show after hours."""
    out, work_dir = request.out.absolute(), request.work_dir.absolute()
    if out == work_dir or out in work_dir.parents:
        raise UserError(f"Expected --work-dir outside of --out, got {work_dir}.")
    if not out.exists():
        return
    # A run killed between writing the artifact and saying so finds its own work.
    if is_artifact(out) and (request.overwrite or work_dir.exists()):
        return
    hint = "; --overwrite replaces it" if is_artifact(out) else ""
    raise UserError(f"Expected --out to name a new folder, {out} exists{hint}.")


@contextlib.contextmanager
def _quiet_stdout(quiet: bool) -> Generator[None]:
    """Sends to stderr what the collectives' library prints to stdout on a CPU."""
    if not quiet:
        yield
        return
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def _run(request: _Request) -> Done | None:
    """Calibrates and writes the artifact; None in all processes but the first."""
    started = time.monotonic()
    dtype = choose_dtype(request.dtype)
    with CalibrationScreen() as screen:
        screen.phase("loading the model")
        model = load(request.model, dtype)
        _check_layers(request, model)
        screen.phase("reading the data")
        plan = _make_plan(request, model)
        screen.phase("hashing the model")
        identity = identify(model)
        description = _describe_run(request, plan, identity, dtype)
        start = init_state(
            num_layers=model.config.num_layers,
            num_kv_heads=model.config.num_kv_heads,
            num_classes=len(plan.classes),
            fingerprint=fingerprint(description),
        )
        with checking_input():
            processes.check_same(fingerprint(description))
        with _store(request, description) as store:
            state = _resume(store, start)
            resumed = int(state.num_samples.sum())
            if resumed:
                screen.note(f"going on after {resumed} samples of an earlier run")
            observing = time.monotonic()
            state = _observe(request, model, plan, state, store, screen)
        observed = time.monotonic() - observing
    if jax.process_index():
        return None
    scales, manifest = _write(request, plan, identity, state)
    if store is not None and not request.keep_work_dir:
        store.remove()
    return Done(
        plan=plan,
        state=state,
        scales=scales,
        manifest=manifest,
        resumed_samples=resumed,
        observe_s=observed,
        total_s=time.monotonic() - started,
    )


def _check_layers(request: _Request, model: "LoadedModel") -> None:
    num_layers = model.config.num_layers
    unknown = [i for i in request.high_precision_layers if not 0 <= i < num_layers]
    if unknown:
        raise UserError(
            f"Expected --kv-high-precision-layers within 0 to {num_layers - 1}, the "
            f"model's layers, got {unknown[0]}."
        )
    if len(request.high_precision_layers) == num_layers:
        raise UserError(
            "Expected a layer to make scales for, but --kv-high-precision-layers "
            f"names all {num_layers}."
        )


def _make_plan(request: _Request, model: "LoadedModel") -> SamplePlan:
    context = model.config.max_context
    max_seq_len = min(request.max_seq_len, context)
    if max_seq_len < request.max_seq_len:
        _warn(f"--max-seq-len is set to {context}, the model's context.")
    with checking_input():
        plan = make_plan(
            request.sources,
            make_encoder(model),
            num_samples=request.num_samples,
            max_seq_len=max_seq_len,
            seed=request.seed,
            bos_id=model.tokenizer.bos_id,
        )
    if len(plan.samples) < request.num_samples:
        _warn(
            f"the data gives {len(plan.samples)} of the {request.num_samples} samples "
            "asked for: all of it is used."
        )
    return plan


def _describe_run(
    request: _Request,
    plan: SamplePlan,
    identity: ModelIdentity,
    dtype: options.ComputeDtype,
) -> dict[str, Any]:
    """All that the amax depend on. Granularity and headroom come after them."""
    return {
        "model": dataclasses.asdict(identity),
        "dtype": dtype.value,
        "platform": jax.default_backend(),
        "jax version": jax.__version__,
        "data": [dataclasses.asdict(file) for file in describe_data(plan).files],
        "num_samples": request.num_samples,
        "max_seq_len": plan.max_seq_len,
        "seed": plan.seed,
        "batch_size": request.batch_size,
        "rule": request.rule.value,
    }


@contextlib.contextmanager
def _store(
    request: _Request, description: dict[str, Any]
) -> Generator[StateStore | None]:
    """Opens the running state in process 0; the others have none."""
    if jax.process_index():
        yield None
        return
    with _telling_others():
        store = StateStore(request.work_dir, description, fresh=not request.resume)
    with store:
        yield store


def _resume(store: StateStore | None, start: AmaxState) -> AmaxState:
    """Takes up a saved state, at the same batch in every process."""
    state = start
    if store is not None:
        with _telling_others():
            state = store.load(start) or start
    with checking_input():
        first = processes.tell_start(int(state.next_batch))
    return dataclasses.replace(state, next_batch=np.array(first, np.int64))


@contextlib.contextmanager
def _telling_others() -> Generator[None]:
    """Checks input in process 0; on an error the others stop, too."""
    try:
        with checking_input():
            yield
    except UserError:
        with contextlib.suppress(ValueError):
            processes.tell_start(None)
        raise


def _observe(
    request: _Request,
    model: "LoadedModel",
    plan: SamplePlan,
    state: AmaxState,
    store: StateStore | None,
    screen: CalibrationScreen,
) -> AmaxState:
    from models.full_attention import full_attention

    run = OfflineCalibration(
        model.forward,
        model.params,
        full_attention,
        plan,
        batch_size=request.batch_size,
        state=state,
        store=store,
        batches_per_save=request.save_every,
    )
    screen.watch(plan)
    try:
        for event in run.run():
            match event:
                case Compiling():
                    shape = f"{event.num_rows} x {event.length}"
                    screen.phase(f"compiling for {shape} tokens")
                case Observed():
                    screen.advance(event)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise UserError(
            "Expected the model and a batch to fit the device's memory, but it ran "
            "out: try a smaller --batch-size or --max-seq-len, or --dtype bfloat16."
        ) from error
    return run.state


def _write(
    request: _Request, plan: SamplePlan, identity: ModelIdentity, state: AmaxState
) -> tuple[ScaleSet, Manifest]:
    config = request.config
    scales = make_scales(
        state,
        granularity=config.granularity,
        headroom=config.headroom,
        skipped_layers=request.high_precision_layers,
    )
    manifest = make_manifest(
        scales,
        identity,
        data=describe_data(plan),
        headroom=config.headroom,
        rule=request.rule.value,
        envelope=describe_envelope(plan),
    )
    with checking_input():
        if is_artifact(request.out) and not request.overwrite:
            return scales, _find_own(request.out, manifest)
        try:
            overwrite = request.overwrite and is_artifact(request.out)
            written = write_artifact(request.out, scales, manifest, overwrite=overwrite)
        except OSError as error:
            raise UserError(
                f"Expected to write {request.out}: {error.strerror}."
            ) from error
    return scales, written


def _find_own(out: Path, manifest: Manifest) -> Manifest:
    """Takes an artifact that is there already for ours if it says the same."""
    _, found = read_artifact(out)
    sha256 = found.scales_sha256
    if (
        found.artifact_id
        != dataclasses.replace(manifest, scales_sha256=sha256).artifact_id
    ):
        raise UserError(
            f"Expected --out to name a new folder, {out} holds another artifact; "
            "--overwrite replaces it."
        )
    return found


def _warn(message: str) -> None:
    """Prints a warning, once for all processes."""
    if jax.process_index() == 0:
        print_warning(message)

"""Scores, reports and contents of models as tables for people; its imports take seconds."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from shlex import quote

from rich.panel import Panel
from rich.table import Table

from exl2flow.cli.output.console import OUT, plain, say, show, tell
from exl2flow.cli.output.tables import plan_table, table_of
from exl2flow.core import words
from exl2flow.core.options.sweep import REPORT_PAGE
from exl2flow.core.reports import (
    LayerExperts,
    MatrixReport,
    Report,
    SublayerReport,
    matrices_of,
    total_nats,
)
from exl2flow.core.store.files import replacing
from exl2flow.inference.bench import DecodePlan, Speed, Timing
from exl2flow.inference.report.blocks import by_block
from exl2flow.inference.report.comparison import Compared, check_bitrates, compared, known_score
from exl2flow.inference.report.costs import concentration, dominant
from exl2flow.inference.report.experts import coverage_in_words, mean_changed_routes, never_routed
from exl2flow.inference.report.inspection import ModelContents
from exl2flow.inference.report.tables import (
    bitrate_row,
    certainty_rows,
    cost_rows,
    report_rows_in_words,
    score_rows,
    scored_on,
)
from exl2flow.pipeline.hub.publish import PublicationDraft, Published

CELLS_PER_LINE = 4  # sublayers per line in the compact list of bits
MOST_COSTLY = 6  # matrices listed


def score_table(report: Report) -> Table:
    """Return source and result beside each other, titled by how sure they are."""
    return table_of(score_rows(report), f"Validation: {report_rows_in_words(report)}")


def layer_table(layers: Sequence[SublayerReport]) -> Table:
    """Return bits per weight of every sublayer and of each layer's experts, several per line."""
    table = Table(title="Bits per weight", title_justify="left", box=None, show_header=False)
    cells = [
        f"[dim]{plain(words.short(layer.name))}[/dim] {words.bits(layer.bpw)}"
        for layer in by_block(layers)
    ]
    for begin in range(0, len(cells), CELLS_PER_LINE):
        table.add_row(*cells[begin : begin + CELLS_PER_LINE])
    return table


def cost_table(items: Sequence[MatrixReport]) -> Table | None:
    """Return the most costly matrices, titled by their share; None if costs are unknown."""
    total = total_nats(items)
    if not total:
        return None
    title = f"Where the divergence comes from: {concentration(items)}"
    return table_of(cost_rows(dominant(items, MOST_COSTLY), total), title)


def print_report(report: Report, folder: str) -> None:
    """Print the result of a conversion, whose report is in a folder."""
    show(score_table(report))
    show(layer_table(report.layers))
    costly = cost_table(matrices_of(report.layers))
    if costly is not None:
        show(costly)
    if report.experts.layers:
        _print_experts(report.experts.layers)
    if report.sample:
        show(Panel(plain(report.sample), title="sample of the result", expand=False))
    _print_warnings(report.warnings)
    tell(f"model   {report.model}")
    tell(f"report  {folder}/report.md")
    model = quote(report.model)
    tell(f"to talk to it:         exl2flow chat {model}")
    tell(f"to write a web page:   exl2flow report {model}")


def _print_experts(layers: Sequence[LayerExperts]) -> None:
    """Print how well the text covered all experts; the report has a table of them."""
    tell(f"{coverage_in_words(layers)}.")
    if unused := never_routed(layers):
        tell(f"Never routed: {unused}.")
    if (changed := mean_changed_routes(layers)) is not None:
        tell(f"{words.percent(changed)} of the choices of experts differ from the source's.")


def _print_warnings(texts: Iterable[str]) -> None:
    for text in texts:
        OUT.print(f"[yellow]warning:[/yellow] {plain(text)}", soft_wrap=True)


def comparison_table(models: Sequence[Compared]) -> Table:
    """Return one line per scored model."""
    score = models[0].score
    return table_of([*map(bitrate_row, models)], "" if score is None else scored_on(score))


def show_comparison(models: Sequence[Compared]) -> None:
    """Print the figures of scored models and how sure they are."""
    show(comparison_table(models))
    if rows := certainty_rows(models):
        show(table_of(rows, "95 % intervals"))


def print_sweep(out: Path, bitrates: Iterable[str], warnings: Iterable[str]) -> None:
    """Print the result of a sweep: its models compared, and where they are."""
    scores = [s for name in bitrates if (s := known_score(out / name)) is not None]
    if scores:
        models = compared(scores)
        show_comparison(models)
        if sound := check_bitrates(models)[0]:
            tell(sound)
    _print_warnings(warnings)
    tell(f"models  {out}")
    tell(f"report  {out / REPORT_PAGE}")


def print_draft(draft: PublicationDraft) -> None:
    """Print the card on stdout; on stderr the files of each branch and what was not checked."""
    tell(draft.card)
    for branch, files in draft.branches.items():
        say(f"{branch:<10} {', '.join(files)}")
    for note in draft.notes:
        say(f"warning: would be published despite: {note}", style="yellow")
    for what in draft.unchecked:
        say(f"not checked: {what}")


def print_published(published: Published) -> None:
    """Print the branches on the Hub, with their commits and address."""
    for branch, commit in published.branches.items():
        tell(f"{branch:<10} {commit}")
    visible = "private" if published.private else "public"
    tell(f"{visible:<10} {published.url}")
    for note in published.notes:
        say(f"warning: published despite: {note}", style="yellow")


def show_speed(speed: Speed) -> None:
    """Print how fast a model loads, reads and decodes."""
    show(plan_table(_speed_summary(speed)))
    show(table_of([_timing_row(timing, speed) for timing in speed.timings]))
    if speed.plans:
        show(table_of([_plan_row(plan) for plan in speed.plans], "Products of a layer"))
    for text in speed.omitted:
        say(f"left out: {text}", style="yellow")


def _speed_summary(speed: Speed) -> list[tuple[str, str]]:
    copies = "" if speed.copy_rate is None else f", copies at {speed.copy_rate:,.0f} GB/s"
    rate = words.size(speed.file_bytes / speed.load_seconds)
    lines = [
        ("model", speed.model),
        ("device", speed.device + copies),
        ("versions", ", ".join(f"{name} {number}" for name, number in speed.versions.items())),
        ("load", f"{speed.load_seconds:.2f} s, {words.size(speed.file_bytes)}, {rate}/s"),
    ]
    if speed.memory is not None:
        counts = (speed.memory.weights, speed.memory.cache, speed.memory.peak)
        weights, cache, peak = map(words.size, counts)
        lines.append(("memory", f"weights {weights}, cache at most {cache}, peak {peak}"))
    return [*lines, ("cache", speed.cache), ("path", _path(speed))]


def _path(speed: Speed) -> str:
    """Return what kernels are compiled for, and their limits, for each kind of GPU."""
    cards = [
        f"sm_{card.capability} with {card.copies}, {card.processors} multiprocessors, "
        f"{card.shared >> 10} KB of shared memory per CTA"
        for card in speed.cards
    ]
    return "; ".join(dict.fromkeys(cards)) or "torch, without a GPU"


def _timing_row(timing: Timing, speed: Speed) -> dict[str, str]:
    """Return a row of the table; only a GPU has a last column."""
    row = {
        "work": timing.work,
        "rows": str(timing.rows),
        "context": f"{timing.context:,}",
        "ms": f"{1e3 * timing.seconds:,.3f}",
        "tokens/s": f"{timing.tokens_per_second:,.1f}",
    }
    if speed.copy_rate is not None:
        share = timing.share_of_copy(speed.copy_rate)
        row["share of a copy"] = "" if share is None else words.percent(share, 0)
    return row


def _plan_row(plan: DecodePlan) -> dict[str, str]:
    """Return how a layer's products run for a number of rows."""
    many = "one by one" if plan.launches else "decoded"
    return {
        "rows": str(plan.rows),
        "products": "chain" if plan.launches == 1 else many,
        "launches": str(plan.launches or ""),
        "kernel": " ".join(plan.kernels),
        "slots": "" if plan.slots is None else str(plan.slots),
        "CTAs": "" if plan.ctas is None else str(plan.ctas),
        "KB": "" if plan.shared is None else str(-(-plan.shared >> 10)),
        "fill": "" if plan.fill is None else words.percent(plan.fill, 0),
    }


def show_contents(contents: ModelContents, *, matrices: bool) -> None:
    """Print a model and its sublayers, or its matrices."""
    show(plan_table(_summary(contents)))
    show(table_of(_matrix_rows(contents) if matrices else _part_rows(contents)))
    costly = cost_table(contents.matrices)
    if costly is not None and not matrices:
        show(costly)


def _summary(contents: ModelContents) -> list[tuple[str, str]]:
    declared = contents.declared
    quantized = sum(part.bits for part in contents.parts) // 8
    stated = f", stated {declared['bits']}" if "bits" in declared else ""
    return [
        ("model", str(contents.folder)),
        ("architecture", contents.architecture or "unknown"),
        ("bits per weight", f"{words.bits(contents.bpw)} in the layers{stated}"),
        *([("MTP block", _block(contents.block_bpw))] if contents.block_bpw else []),
        (
            "quantized",
            f"{sum(p.numel for p in contents.parts) / 1e6:.1f} M weights, {words.size(quantized)}",
        ),
        ("other tensors", words.size(contents.plain_bytes)),
        *([("in host memory", _in_host(contents.host_bytes))] if contents.host_bytes else []),
        ("files", words.size(contents.file_bytes)),
        *_divergence(contents),
        *_experts(contents),
    ]


def _in_host(nbytes: int) -> str:
    return f"{words.size(nbytes)} of these, the embedding, whose rows a GPU reads there"


def _block(bpw: float) -> str:
    return f"{words.bits(bpw)} bits per weight, counted apart"


def _divergence(contents: ModelContents) -> list[tuple[str, str]]:
    """Return the measured and the estimated KL divergence, if known."""
    record = contents.record
    if record is None:
        return []
    lines = [
        f"{words.divergence(score['kl_divergence'])} nats on {score['tokens']:,} {text} tokens"
        for text, score in (("held-out", record.score), ("calibration", record.calibration))
        if score is not None and score.keys() >= {"kl_divergence", "tokens"}
    ]
    if record.predicted_kl is not None:
        when = " before tuning" if record.is_tuned else ""
        lines.append(f"{words.divergence(record.predicted_kl)} estimated, sum over matrices{when}")
    if record.allocated_kl is not None:
        lines.append(f"{words.divergence(record.allocated_kl)} expected when bits were allotted")
    return [("" if index else "KL divergence", line) for index, line in enumerate(lines)]


def _experts(contents: ModelContents) -> list[tuple[str, str]]:
    """Return how many tokens the experts had, and the routes that changed, if known."""
    layers = contents.record.experts.layers if contents.record else ()
    if not layers:
        return []
    lines = [("experts", coverage_in_words(layers))]
    if unused := never_routed(layers):
        lines.append(("never routed", unused))
    if (changed := mean_changed_routes(layers)) is not None:
        lines.append(("changed routes", f"{words.percent(changed)} of the choices of experts"))
    return lines


def _listed(values: Iterable[int]) -> str:
    return "/".join(map(str, values))


def _part_rows(contents: ModelContents) -> list[dict[str, str]]:
    return [
        {
            "sublayer": words.short(part.name),
            "bits per weight": words.bits(part.bpw),
            "bit widths": _listed(part.bit_widths),
            "group sizes": _listed(part.group_sizes),
            "size": words.size(part.bits / 8),
            "cost (nats)": words.cost(part.nats),
            "relative error": words.error(part.rel_err),
        }
        for part in contents.parts
    ]


def _matrix_rows(contents: ModelContents) -> list[dict[str, str]]:
    """Return a row per matrix; bit widths with the share of in-features that have them."""
    return [
        {
            "matrix": words.short(matrix.key),
            "bits per weight": words.bits(matrix.bpw),
            "bit widths": " ".join(
                f"{bits}:{rows / matrix.shape[0]:.0%}" for bits, rows in matrix.rows.items()
            ),
            "group sizes": _listed(matrix.group_sizes),
            "cost (nats)": words.cost(matrix.nats),
            "relative error": words.error(matrix.rel_err),
        }
        for matrix in contents.matrices
    ]


def write_matrices(contents: ModelContents, csv: Path | None, parquet: Path | None) -> None:
    """Write the table of matrices to these files.

    Raises:
        WriteFailed: a file cannot be written.
    """
    if csv is None and parquet is None:
        return
    from exl2flow.inference.report.frames import allocation_frame  # imports pandas

    frame = allocation_frame(contents)
    for path in filter(None, (csv, parquet)):
        text = frame.to_csv(index=False).encode() if path is csv else frame.to_parquet(index=False)
        with replacing(path) as file:
            file.write(text)
        say(f"matrices {path}")

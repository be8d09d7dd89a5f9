"""What a person sees while a run goes on, on a terminal and in a log."""

from __future__ import annotations

import io
import re
from typing import Any

import pytest
from rich.console import Console

from winnow.observe.console import ConsoleSink, LiveConsole, evaluation_lines, make_console
from winnow.observe.sinks import RunInfo

Records = list[dict[str, float]]


class Clock:
    """A second passes at each look."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def console_to(file: Any, is_terminal: bool, width: int = 100) -> Console:
    return Console(
        file=file,
        width=width,
        height=30,
        force_terminal=is_terminal,
        color_system=None,
        legacy_windows=False,
        _environ={"TERM": "xterm"},
    )


def run(sink: ConsoleSink, records: Records, last: int = 80) -> None:
    sink.start(RunInfo("quickstart", last))
    for record in records:
        sink.show_status("generating 3/64 groups")
        sink.log(int(record["step"]), record)
    sink.close()


def without_codes(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


def in_a_log(records: Records, last: int = 80) -> list[str]:
    file = io.StringIO()
    run(ConsoleSink(console_to(file, False), Clock()), records, last)
    return file.getvalue().splitlines()


def live(sink: LiveConsole, console: Console) -> str:
    """What a terminal shows at the moment."""
    with console.capture() as capture:
        console.print(sink)
    return without_codes(capture.get())


def test_a_log_gets_one_line_a_step_and_the_heads_once(quickstart_records: Records) -> None:
    lines = in_a_log(quickstart_records)
    steps = [line for line in lines if re.match(r" *\d+/80 ", line)]
    assert len(steps) == 80
    assert sum("accuracy" in line and "entropy" in line for line in lines) == 1
    assert len(lines) == 80 + 1 + 5
    assert "\x1b" not in "".join(lines)
    assert max(map(len, lines)) <= 100
    assert max(map(len, in_a_log(quickstart_records[1:2], last=5000))) <= 80


def test_a_line_shows_the_figures_under_their_heads(quickstart_records: Records) -> None:
    assert in_a_log(quickstart_records[1:2]) == [
        " step accuracy reward  kept length cut off entropy tokens/s s/step     left",
        " 1/80     32 %  -0.36  59 %   51.8     9 %    0.49   23,456   1.30     1:19",
    ]


def test_an_evaluation_is_one_line_with_the_largest_k(quickstart_records: Records) -> None:
    record = quickstart_records[0] | {
        "eval/sort_digits/pass@8": 0.9,
        "eval/openai/gsm8k/avg@4": 0.2,
    }
    assert evaluation_lines(0, record) == [
        "held out, start: sort_digits 30.0 %, greedy 57.0 %, pass@16 95.0 %, length 52, "
        "cut off 10.0 %",
        "held out, start: openai/gsm8k 20.0 %",
    ]
    wrong = {"eval/gsm8k/pass@1": 0.0, "eval/gsm8k/unread": 0.92}
    assert evaluation_lines(5, wrong) == [
        "held out, step 5: gsm8k 0.0 %, nothing to compare found in 92.0 %"
    ]
    assert evaluation_lines(5, {**wrong, "eval/gsm8k/pass@1": 0.01})[0].endswith("gsm8k 1.0 %")
    assert evaluation_lines(20, record)[1].startswith("held out, step 20: openai/gsm8k")
    assert evaluation_lines(3, {"actor/entropy": 1.0}) == []


def test_a_terminal_gets_a_bar_and_a_line_every_few_steps(quickstart_records: Records) -> None:
    file = io.StringIO()
    run(LiveConsole(console_to(file, True), Clock()), quickstart_records)
    shown = without_codes(file.getvalue())
    steps = [line for line in shown.splitlines() if re.match(r" *\d+/80 ", line)]
    assert [int(line.split("/")[0]) for line in steps] == [1, *range(5, 81, 5)]
    assert shown.count("accuracy reward") == 1
    assert re.search(r"step 79/80 .*left", shown) or re.search(r"step 80/80 .*left", shown)
    assert "accuracy 88 %   reward 0.66   kept 41 %   length 46.2" in shown
    assert max(map(len, shown.splitlines())) <= 100
    assert file.getvalue().endswith("\x1b[2K")  # the bar is taken away


@pytest.mark.parametrize("steps", [80, 100, 5000])
def test_at_80_columns_each_row_is_whole_up_to_the_time_left(
    quickstart_records: Records, steps: int
) -> None:
    file = io.StringIO()
    sink = LiveConsole(console_to(file, True, 80), Clock())
    run(sink, quickstart_records[:2], last=steps)
    lines = without_codes(file.getvalue()).replace("\r", "\n").splitlines()
    head = next(line for line in lines if line.lstrip().startswith("step accuracy"))
    row = next(line for line in lines if line.lstrip().startswith(f"1/{steps} "))
    assert head.rstrip().endswith("s/step     left")
    assert re.search(r" [\d.]+ +\d+:\d\d(:\d\d)?$", row.rstrip())
    assert len(head) == len(row) <= 80


def test_the_bar_counts_down_from_the_time_that_the_row_says() -> None:
    now = [0.0]
    console = console_to(io.StringIO(), True)
    sink = LiveConsole(console, lambda: now[0])
    sink.start(RunInfo("a", 11))
    now[0] = 60.0
    sink.log(1, {})
    shown = []
    for seconds in (60.0, 70.0, 3000.0):
        now[0] = seconds
        shown.append(re.findall(r"gone, (\S+) left", live(sink, console))[0])
    sink.close()
    assert shown == ["10:00", "9:50", "0:00"]


def test_a_status_shows_before_the_figures_until_the_step_is_logged() -> None:
    console = console_to(io.StringIO(), True)
    sink = LiveConsole(console)
    sink.start(RunInfo("a", 3))
    sink.show_status("generating 3/64 groups")
    assert "generating 3/64 groups" in live(sink, console)
    sink.log(1, {"sampling/accuracy": 0.5})
    shown = live(sink, console)
    sink.close()
    assert "generating" not in shown
    assert "accuracy 50 %" in shown


def test_the_live_line_has_whole_figures_only(quickstart_records: Records) -> None:
    def figures(width: int) -> str:
        console = console_to(io.StringIO(), True, width)
        sink = LiveConsole(console)
        sink.start(RunInfo("a", 80))
        sink.log(1, quickstart_records[1])
        shown = live(sink, console)
        sink.close()
        return shown.splitlines()[-1].strip()

    whole = figures(200).split("   ")
    assert len(whole) == 8
    for width in range(40, 110):
        shown = figures(width).split("   ")
        assert shown == whole[: len(shown)]


def test_imitation_shows_its_losses_and_tokens() -> None:
    file = io.StringIO()
    sink = ConsoleSink(console_to(file, False), Clock())
    sink.start(RunInfo("sft", 3, kind="sft"))
    sink.log(1, {"sft/loss": 2.5, "sft/held_out_loss": 3.25, "sft/tokens": 4096, "time/step_s": 2})
    heads, row = file.getvalue().splitlines()
    assert heads.split() == ["step", "loss", "held", "out", "tokens", "s/step", "left"]
    assert row.split()[1:5] == ["2.500", "3.250", "4,096", "2.00"]


def test_the_time_left_leaves_out_the_evaluation_before_training() -> None:
    file, clock = io.StringIO(), Clock()
    sink = ConsoleSink(console_to(file, False), clock)
    sink.start(RunInfo("a", 11))
    clock.now += 1000
    sink.log(0, {"eval/a/pass@1": 0.5})
    sink.log(1, {})
    assert file.getvalue().splitlines()[-1].endswith("0:10")


def test_a_warm_up_in_a_log_takes_about_ten_lines(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "winnow")
    file = io.StringIO()
    sink = ConsoleSink(console_to(file, False), Clock())
    sink.start(RunInfo("quickstart", 1000, kind="warm_up"))
    for step in range(1, 1001):
        sink.log(step, {"sft/loss": 2 - step / 1000})
    lines = file.getvalue().splitlines()
    assert len(lines) == 11
    assert lines[0].split() == ["step", "loss", "left"]
    assert lines[-1].split() == ["1000/1000", "1.000", "0:00"]
    assert caplog.messages == [f"warm-up: step {n} of 1000" for n in range(100, 1001, 100)]


def test_a_warm_up_on_a_terminal_leaves_one_line_and_the_run_starts_anew() -> None:
    file = io.StringIO()
    sink = LiveConsole(console_to(file, True), Clock())
    sink.start(RunInfo("quickstart", 1000, kind="warm_up"))
    for step in range(1, 1001):
        sink.log(step, {"sft/loss": 2 - step / 1000})
    sink.start(RunInfo("quickstart", 80))
    sink.log(1, {})
    sink.close()
    shown = without_codes(file.getvalue())
    assert "warm-up: 1,000 steps in " in shown
    assert ", loss 1.999 -> 1.000" in shown
    assert "step 0/80" in shown or "step 1/80" in shown


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_terminal_without_utf_8_gets_ascii(
    quickstart_records: Records, is_terminal: bool
) -> None:
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding="ascii", errors="strict", write_through=True)
    run(make_console("auto", console_to(file, is_terminal, 60)), quickstart_records)
    assert b"80/80" in raw.getvalue()
    assert max(raw.getvalue()) < 128


def test_notes_are_printed_whole_and_without_markup() -> None:
    for is_terminal in (True, False):
        file = io.StringIO()
        sink = make_console("auto", console_to(file, is_terminal, 40))
        sink.start(RunInfo("a", 1))
        sink.print_line("[bold]all groups were all-wrong[/bold]: " + "x" * 60)
        sink.close()
        text = without_codes(file.getvalue()).replace("\n", "").replace("\r", "")
        assert "[bold]all groups were all-wrong[/bold]:" in text
        assert text.count("x") == 60

"""Pictures of what monitors log: what is in them, exactly, and what they leave out."""

import math
from pathlib import Path

import numpy as np
import pytest

import dualtrain as dt
from dualtrain.cli import main
from dualtrain.errors import ArgumentValueError
from dualtrain.logs import plot_attention, plot_logs, plot_monitor, read_log
from dualtrain.records import Record
from dualtrain.sinks import JsonlSink

ATTENTION, PARAMETERS, STEPS = Path("attention.jsonl"), Path("parameters.jsonl"), Path("steps.jsonl")
META = {"model": "ViT", "backend": "torch"}


@pytest.fixture
def figures(monkeypatch):
    """The figures that are drawn, before they are written."""
    from matplotlib.figure import Figure

    drawn, write = [], Figure.savefig

    def savefig(figure, *arguments, **options):
        drawn.append(figure)
        figure.set_layout_engine("none")  # layout takes most of the time, and is not what is tested
        write(figure, *arguments, **{**options, "dpi": 20})

    monkeypatch.setattr(Figure, "savefig", savefig)
    return drawn


def write(path, *records, meta=META):
    """Write a log of records ``(step, values, arrays)``; return its path."""
    sink = JsonlSink(path, meta=meta)
    for step, values, *arrays in records:
        sink.write(Record(step, 1, "train", 1700000000.0, values, *arrays))
    sink.close()
    return Path(path)


def heads(layer, *entropies):
    """Return the rows of a layer in a TransformerMonitor's table."""
    return [{"layer": layer, "head": i, "attention_entropy": value} for i, value in enumerate(entropies)]


def per_key(keys, shift=0):
    """Return what each key gets, of two heads: shares that grow with the key's place, slowly and fast."""
    grown = np.arange(1, keys + 1) ** np.array([[1 + shift], [2.0]])
    return (grown / grown.sum(axis=1, keepdims=True)).astype(np.float32)


def attention_log(path=ATTENTION, steps=(1, 50, 100), keys=16):
    """Write the log of a TransformerMonitor: two layers of two heads."""
    return write(
        path,
        *[
            (
                step,
                {
                    "global_step": step,
                    "grad_norm": 2.0,
                    "grad_norm_clipped": 1.0,
                    "attention": heads(0, 1.0, 2.0) + heads(1, 0.5, 0.5 + step / 100),
                },
                {"layer0": per_key(keys, step / 100), "layer1": per_key(keys)},
            )
            for step in steps
        ],
    )


def parameters_log(path=PARAMETERS, groups=2):
    """Write the log of a ParameterMonitor."""

    def table(step):
        return [
            {"group": f"group {i}", "weight_norm": 1.0, "grad_norm": 1.0, "update_ratio": (i + 1) / step}
            for i in range(groups)
        ]

    dead = ["a.bias"]
    values = {s: {"global_step": s, "parameters": table(s), "dead_gradients": dead} for s in (1, 5, 10)}
    return write(path, *values.items())


def steps_log(path=STEPS):
    """Write the log of a StepLogger."""
    values = {s: {"global_step": s, "loss": 1 / s, "lr": 0.1, "elapsed_sec": 1.0} for s in (1, 2)}
    return write(path, *values.items())


def titles(figure):
    return [panel.get_title(loc="left") for panel in figure.axes if panel.get_title(loc="left")]


def panel_of(figure, word):
    (panel,) = [panel for panel in figure.axes if word in panel.get_title(loc="left")]
    return panel


def curves(panel):
    """Return label -> points, of the curves that have one."""
    lines = [line for line in panel.get_lines() if not line.get_label().startswith("_")]
    return {line.get_label(): line.get_xydata().tolist() for line in lines}


def texts(panel):
    return [text.get_text() for text in panel.texts]


# The health of a run.


def test_logs_of_one_run_become_one_picture(figures):
    logs = [attention_log(), parameters_log(), steps_log()]
    assert plot_monitor(logs, "deep/run.png") == Path("deep/run.png")
    assert Path("deep/run.png").read_bytes().startswith(b"\x89PNG")
    (figure,) = figures
    assert titles(figure) == [
        "loss and learning rate",
        "gradient norm",
        "entropy of attention: mean and range of the heads",
        "change of the weights per update",
    ]
    assert figure.get_suptitle() == "ViT on torch"
    assert all(panel.get_xlabel() == "step" for panel in figure.axes if panel.get_title(loc="left"))
    assert all(panel.get_ylabel() for panel in figure.axes)


@pytest.mark.parametrize(
    ("make", "expected"),
    [(attention_log, ["gradient", "entropy"]), (parameters_log, ["change"]), (steps_log, ["loss"])],
)
def test_one_log_has_the_panels_of_what_is_in_it(make, expected, figures):
    plot_monitor(read_log(make()), "run.png", title="mine")
    assert [title.split()[0] for title in titles(figures[0])] == expected
    assert figures[0].get_suptitle() == "mine"


def test_loss_and_rate_have_an_axis_each(figures):
    plot_monitor(str(steps_log()), "run.png")
    loss, rate = figures[0].axes
    assert curves(loss) == {"loss": [[1, 1.0], [2, 0.5]]}
    assert curves(rate) == {"lr": [[1, 0.1], [2, 0.1]]}
    assert (loss.get_ylabel(), rate.get_ylabel()) == ("loss", "learning rate")


def test_a_loss_without_a_rate_has_one_axis(figures):
    write(STEPS, (1, {"loss": 1.0, "eval_loss": 3.0}), (2, {"loss": 2.0}))
    plot_monitor(STEPS, "run.png")
    (panel,) = figures[0].axes
    assert curves(panel) == {"loss": [[1, 1.0], [2, 2.0]], "eval_loss": [[1, 3.0]]}
    assert titles(figures[0]) == ["loss"]


def test_rows_of_evaluations_are_left_out(figures):
    sink = JsonlSink(PARAMETERS)
    for mode, factor in (("train", 1.0), ("eval", 8.0)):
        table = [{"group": mode, "update_ratio": 0.5 * factor}]
        sink.write(Record(1, 1, mode, 0.0, {"loss": factor, "parameters": table}))
    sink.close()
    plot_monitor(PARAMETERS, "run.png")
    loss, ratios = figures[0].axes
    assert curves(loss) == {"loss": [[1, 1.0]]}
    assert [label for label in curves(ratios) if not label.startswith("_")] == ["train"]


def test_gradient_norms_are_drawn_with_the_thresholds(figures):
    plot_monitor(attention_log(), "run.png", grad_norm_threshold=0.01, explosion_threshold=50)
    panel = panel_of(figures[0], "gradient")
    assert curves(panel)["grad_norm"] == [[1, 2.0], [50, 2.0], [100, 2.0]]
    assert curves(panel)["grad_norm_clipped"] == [[1, 1.0], [50, 1.0], [100, 1.0]]
    assert texts(panel) == ["vanishing: below 0.01", "exploding: above 50"]
    assert panel.get_yscale() == "log"
    assert panel.get_ylim()[0] < 0.01 < 50 < panel.get_ylim()[1]


def test_the_thresholds_are_those_of_the_monitor_unless_given(figures):
    plot_monitor(attention_log(), "run.png")
    monitor = dt.callbacks.TransformerMonitor()
    assert texts(panel_of(figures[0], "gradient")) == [
        f"vanishing: below {monitor.grad_norm_threshold:g}",
        f"exploding: above {monitor.explosion_threshold:g}",
    ]


def test_entropy_is_a_mean_and_a_band_of_heads_below_the_uniform_one(figures):
    plot_monitor(attention_log(), "run.png")
    panel = panel_of(figures[0], "entropy")
    assert curves(panel) == {
        "layer 0": [[1, 1.5], [50, 1.5], [100, 1.5]],
        "layer 1": [[1, pytest.approx(0.505)], [50, 0.75], [100, 1.0]],
    }
    band = panel.collections[1].get_paths()[0].vertices
    assert {tuple(point) for point in band} >= {(50, 0.5), (50, 1.0), (100, 0.5), (100, 1.5)}
    assert texts(panel) == ["uniform over 16 keys: 2.77"]
    assert panel.get_ylim()[1] > math.log(16)


def test_without_arrays_nothing_is_said_of_uniform_attention(figures):
    plot_monitor(write(ATTENTION, (1, {"attention": heads(0, 1.0)})), "run.png")
    assert texts(panel_of(figures[0], "entropy")) == []


def test_what_a_monitor_gave_to_a_logger_is_drawn_as_well(figures):
    values = {"loss": 1.0, "attention_entropy/0": 1.5, "attention_entropy/1": 0.5, "update_ratio/a/b": 0.1}
    plot_monitor(write(STEPS, (1, values), (2, {"loss": 1.0})), "run.png")
    assert curves(panel_of(figures[0], "entropy")) == {"layer 0": [[1, 1.5]], "layer 1": [[1, 0.5]]}
    assert curves(panel_of(figures[0], "change")) == {"a/b": [[1, 0.1]]}


def test_update_ratios_are_a_line_a_group(figures):
    plot_monitor(parameters_log(), "run.png")
    panel = panel_of(figures[0], "change")
    assert curves(panel) == {
        "group 0": [[1, 1.0], [5, 0.2], [10, 0.1]],
        "group 1": [[1, 2.0], [5, 0.4], [10, 0.2]],
    }
    assert panel.get_yscale() == "log"
    assert texts(panel) == ["usual: about 0.001"]


def test_of_many_groups_the_legend_names_three(figures):
    plot_monitor(parameters_log(groups=40), "run.png")
    panel = panel_of(figures[0], "change")
    assert [*curves(panel)] == ["group 0", "group 20", "group 39"]
    assert len(panel.get_lines()) == 41


def test_values_that_are_no_numbers_are_gaps(figures):
    table = [{"group": "a", "update_ratio": math.inf}, {"group": "b", "update_ratio": 0.0}]
    norms = {"grad_norm": math.nan, "grad_norm_clipped": None}
    rows = [
        (1, {**norms, "attention": heads(0, math.nan, None), "parameters": table}),
        (2, {"grad_norm": math.inf, "attention": heads(0, math.nan, 1.0), "loss": None, "lr": (0.1, None)}),
        (3, {"grad_norm": 0.0, "attention": [], "loss": math.nan}),
    ]
    plot_monitor(write(ATTENTION, *rows), "run.png")
    assert curves(panel_of(figures[0], "entropy")) == {"layer 0": [[2, 1.0]]}
    assert Path("run.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("logs", [[], STEPS])
def test_a_log_that_no_monitor_wrote_is_an_error_that_says_what_is_there(logs):
    write(STEPS, (1, {"acc": 0.5}))
    with pytest.raises(
        ArgumentValueError, match=r"loss, lr, grad_norm.*(no log has no values|jsonl has acc)"
    ):
        plot_monitor(logs, "run.png")
    assert not Path("run.png").exists()


# Where attention goes.


def maps(figure):
    """Return the maps in rows, as arrays."""
    shape = figure.axes[0].get_gridspec().get_geometry()
    drawn = [np.asarray(panel.images[0].get_array()) for panel in figure.axes if panel.images]
    return [drawn[row * shape[1] : (row + 1) * shape[1]] for row in range(shape[0])]


def test_a_square_number_of_keys_is_an_image(figures):
    plot_attention(attention_log(), "maps.png")
    (layer0, layer1) = maps(figures[0])
    for step, drawn in zip((1, 50, 100), layer0, strict=True):
        expected = per_key(16, step / 100).mean(axis=0).reshape(4, 4) * 16
        assert drawn == pytest.approx(expected)
    assert len(layer1) == 3
    assert [panel.get_title() for panel in figures[0].axes[:3]] == ["step 1", "step 50", "step 100"]
    assert [panel.get_ylabel() for panel in figures[0].axes[:4:3]] == ["layer 0", "layer 1"]


def test_a_class_token_is_left_out(figures):
    plot_attention(attention_log(keys=17), "maps.png", steps=[50], layers=[1])
    assert maps(figures[0])[0][0] == pytest.approx(per_key(17).mean(axis=0)[1:].reshape(4, 4) * 17)


@pytest.mark.parametrize(("keys", "grid"), [(18, None), (16, False), (2, None), (4, False)])
def test_what_is_no_image_has_a_line_a_head(keys, grid, figures):
    plot_attention(attention_log(keys=keys), "maps.png", steps=[1], layers=[1], grid=grid)
    assert maps(figures[0])[0][0] == pytest.approx(per_key(keys) * keys)
    assert figures[0].axes[0].get_xlabel() == "key position"
    assert figures[0].axes[0].get_ylabel() == "layer 1\nhead"


def test_a_grid_and_a_head_can_be_given(figures):
    plot_attention(attention_log(keys=12), "maps.png", steps=[1], layers=[1], grid=(3, 4), head=1)
    assert maps(figures[0])[0][0] == pytest.approx(per_key(12)[1].reshape(3, 4) * 12)


def test_colours_mean_the_same_in_all_maps(figures):
    plot_attention(attention_log(), "maps.png")
    images = [panel.images[0] for panel in figures[0].axes if panel.images]
    assert len(images) == 6
    assert len({image.norm for image in images}) == 1
    assert figures[0].axes[-1].get_ylabel() == "attention per patch (uniform: 1)"


@pytest.mark.parametrize(
    ("count", "drawn"), [(1, [1]), (3, [1, 2, 3]), (6, [1, 2, 3, 4, 5, 6]), (26, [1, 6, 11, 16, 21, 26])]
)
def test_steps_are_evenly_spaced_from_the_first_to_the_last(count, drawn, figures):
    plot_attention(attention_log(steps=range(1, count + 1)), "maps.png", layers=[0])
    assert [panel.get_title() for panel in figures[0].axes[: len(drawn)]] == [f"step {s}" for s in drawn]


def test_a_layer_that_a_step_lacks_leaves_its_place_empty(figures):
    write(
        ATTENTION, (1, {}, {"layer0": per_key(16)}), (2, {}, {"layer1": per_key(16), "other": np.ones(3)})
    )
    plot_attention(ATTENTION, "maps.png")
    assert [len(panel.images) for panel in figures[0].axes[:4]] == [1, 0, 0, 1]


def test_a_head_that_saw_nothing_is_left_out_of_the_mean(figures):
    shares = per_key(16)
    shares[0] = math.nan
    write(ATTENTION, (1, {}, {"layer0": shares}))
    plot_attention(ATTENTION, "maps.png")
    assert maps(figures[0])[0][0] == pytest.approx(per_key(16)[1].reshape(4, 4) * 16)


@pytest.mark.parametrize("keys", [16, 18])
@pytest.mark.parametrize("value", [1.0, math.nan])
def test_maps_without_any_difference_are_drawn(keys, value, figures):
    write(ATTENTION, (1, {}, {"layer0": np.full((2, keys), value / keys, np.float32)}))
    plot_attention(ATTENTION, "maps.png")
    assert len(figures[0].axes[0].images) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": [1, 2]}, r"no attention of step 2; it has 1, 50, 100"),
        ({"layers": [1, 7]}, r"no layer 7; it has 0, 1"),
        ({"head": 2}, r"head=\.\.\.\) is from 0 to 1, but got 2"),
        ({"grid": (3, 4)}, r"16 patches, or of 15 and a class token, but got \(3, 4\)"),
    ],
)
def test_what_is_not_there_is_an_error_that_lists_what_is(options, message):
    with pytest.raises(ArgumentValueError, match=message):
        plot_attention(attention_log(), "maps.png", **options)
    assert not Path("maps.png").exists()


def test_a_log_without_arrays_has_no_maps():
    with pytest.raises(ArgumentValueError, match="has no arrays beside it"):
        plot_attention(steps_log(), "maps.png")


# Other ways to them.


def test_tables_are_left_out_of_a_comparison(figures):
    a, b = attention_log("a.jsonl"), attention_log("b.jsonl")
    plot_logs([a, b], "both.png")
    assert [panel.get_title() for panel in figures[0].axes] == ["grad_norm", "grad_norm_clipped"]
    with pytest.raises(
        ArgumentValueError, match=r"numbers named 'attention'; they have global_step, grad_norm"
    ):
        plot_logs([a], "one.png", names=["attention"])


def test_a_log_of_tables_alone_cannot_be_compared():
    message = r"that are numbers; plot_monitor draws the tables of a run \(parameters, dead_gradients\)"
    with pytest.raises(ArgumentValueError, match=message):
        plot_logs([parameters_log()], "curve.png")


def test_the_command_draws_a_monitored_run_and_its_maps(capsys, figures):
    logs = [str(log) for log in (attention_log(), parameters_log(), steps_log())]
    assert main(["plot", *logs, "-o", "run.png"]) == 0
    assert capsys.readouterr() == ("run.png\nrun.attention.png\n", "")
    assert len(titles(figures[0])) == 4
    assert len(maps(figures[1])) == 2


def test_the_command_compares_two_runs_and_draws_the_maps_of_each(capsys, figures):
    logs = [str(attention_log(name)) for name in ("a.jsonl", "b.jsonl")]
    assert main(["plot", *logs, "-o", "runs.svg"]) == 0
    assert capsys.readouterr().out.split() == ["runs.svg", "runs.attention.1.svg", "runs.attention.2.svg"]
    assert [panel.get_title() for panel in figures[0].axes] == ["grad_norm", "grad_norm_clipped"]


def test_the_command_shows_tables_by_their_means(capsys):
    assert main(["show", str(attention_log())]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["mean", "attention_entropy", "1.0025", "1.25", "1.0025", "1.25"] in lines
    assert main(["show", str(parameters_log())]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["mean", "update_ratio", "1.5", "0.15", "0.15", "1.5"] in lines
    assert not any("dead_gradients" in line for line in lines)

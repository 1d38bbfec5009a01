# /// script
# [tool.marimo.display]
# theme = "light"
# ///
"""How far are my sweeps, and what does one parameter of a sweep do to a metric?

Reads the views of schema `orch` and nothing else; writes nothing and starts nothing. `orch ui` runs it and sets
ORCH_READER_URL (a login that reads the views only) and ORCH_MLFLOW_UI (where MLflow's pages are).

Non-finite values are news, never numbers: a curve stops before them, and a mark shows where.
"""

import marimo

__generated_with = "0.25.2"
app = marimo.App(width="full", app_title="orch")

with app.setup:
    import html
    import json
    import math
    import os
    from collections import Counter
    from itertools import groupby
    from urllib.parse import quote, urlsplit

    import altair as alt
    import marimo as mo
    import pandas as pd
    import psycopg
    from psycopg.rows import dict_row

    # No menu that sends the data to a web editor; SVG keeps its text readable for screen readers (and tests).
    alt.renderers.set_embed_options(actions=False, renderer="svg")

    MAX_POINTS = 3_000  # sent to the browser for one chart
    MAX_LINES = 200  # trials drawn in one chart; the table has them all
    MAX_KEY_RUNS = 12  # runs whose points are read to learn which metrics there are
    MAX_DISCRETE = 12  # values of an axis that get a colour each
    CONNECT_TIMEOUT_S = 5
    STATEMENT_TIMEOUT_S = 20

    NO_AXIS = "trial"  # colours by the trial's number, where nothing is swept
    SEED = "seed"
    EACH_TRIAL, MEAN_OVER_SEEDS = "each trial", "mean over seeds"

    COLOURS = {
        "finished": "#3f8f6b",
        "stopped": "#8fbfa6",
        "diverged": "#d9822b",
        "failed": "#c23b3b",
        "killed": "#8c6d8f",
        "lost": "#8c6d8f",
        "running": "#3b73b9",
        "waiting": "#e3e5e8",
    }

    SWEEPS = """
        select
            sweep, workload, state, trials, finished, stopped, diverged, failed, killed, lost, running, waiting,
            started_at, ended_at, seconds, metric, mode, experiment_id, description
        from orch.sweeps
        order by coalesce(started_at, created_at) desc, sweep
        limit 200
    """

    AXES = """
        select field.key as axis, bool_or(run.cell ? field.key) as is_grid
        from orch.runs as run
        cross join lateral jsonb_each(run.params) as field
        where run.sweep = %s
        group by field.key
        having count(distinct field.value) > 1
        order by field.key = 'seed', not bool_or(run.cell ? field.key), field.key
    """

    # One run of each cell, so that a metric which only some cells report is found without reading every point.
    KEYS = """
        select distinct key
        from orch.metrics
        where run_id in (
            select run_id from (
                select distinct on (cell) cell, run_id
                from orch.runs where sweep = %s and run_id is not null
                order by cell, last_step desc nulls last, trial
            ) as one_a_cell
            limit %s
        )
        order by key
    """

    TRIALS = """
        select trial, run_id, state, verdict, params, diverged_at, last_step, seconds, reason
        from orch.runs where sweep = %s order by trial
    """

    FINDINGS = """
        select
            severity, check_name, count(distinct trial) as trials,
            (array_agg(message order by trial, step nulls first))[1] as message,
            (array_agg(advice order by trial, step nulls first))[1] as advice
        from orch.findings where sweep = %s
        group by severity, check_name
        order by array_position(array['error', 'warning', 'info'], severity), trials desc, check_name
    """

    # The same steps are kept in every trial (every n-th report), and always a trial's last point and the first
    # non-finite one after a finite one. Trials that are not drawn give their last point only.
    POINTS = """
        select trial, step, value
        from (
            select
                trial, step, value,
                trial = any(%(drawn)s) as is_drawn,
                row_number() over by_step as nth,
                lead(step) over by_step is null as is_last,
                abs(value) < 'Infinity' as is_finite,
                coalesce(lag(abs(value) < 'Infinity') over by_step, true) as was_finite,
                count(*) filter (where trial = any(%(drawn)s)) over () as total
            from orch.metrics
            where sweep = %(sweep)s and key = %(metric)s
            window by_step as (partition by trial order by step)
        ) as point
        where is_last
            or is_drawn and ((nth - 1) %% (1 + total / %(limit)s) = 0 or was_finite and not is_finite)
        order by trial, step
    """


@app.function
def read(query, parameters=()):
    """Rows as dictionaries, over a connection that lives no longer than the query. Raises psycopg.Error."""
    settings = {
        "search_path": "orch",
        "default_transaction_read_only": "on",
        "statement_timeout": f"{STATEMENT_TIMEOUT_S}s",
        "jit": "off",
    }
    with psycopg.connect(
        os.environ.get("ORCH_READER_URL", ""),
        options=" ".join(f"-c{name}={value}" for name, value in settings.items()),
        connect_timeout=CONNECT_TIMEOUT_S,
        application_name="orch dashboard",
        autocommit=True,
        row_factory=dict_row,
    ) as connection:
        return connection.execute(query, parameters).fetchall()


@app.function
def read_fields(sweep):
    """What can be picked in a sweep: its axes (what differs between its trials) and the metrics it has reported."""
    axes = [row["axis"] for row in read(AXES, (sweep,))]
    keys = [row["key"] for row in read(KEYS, (sweep, MAX_KEY_RUNS))]
    return {"sweep": sweep, "axes": [*axes, NO_AXIS], "metrics": keys}


@app.function
def read_curves(sweep, metric):
    """The sweep's trials and findings, and the points of one metric that are worth sending to a browser."""
    trials = read(TRIALS, (sweep,))
    drawn = [trial["trial"] for trial in trials if trial["run_id"]][:MAX_LINES]
    points = read(POINTS, {"sweep": sweep, "metric": metric, "drawn": drawn, "limit": MAX_POINTS})
    findings = read(FINDINGS, (sweep,))
    return {
        "sweep": sweep,
        "metric": metric,
        "trials": trials,
        "drawn": drawn,
        "points": points,
        "findings": findings,
    }


@app.function
def pick(wanted, options, default):
    """`wanted` where it is possible, else the default, else the first option, else None."""
    return next((one for one in (wanted, default, *options) if one in options), None)


@app.function
def in_words(error):
    """One line for a person; libpq's messages hold no password."""
    if not os.environ.get("ORCH_READER_URL"):
        return "ORCH_READER_URL is not set: start this page with `orch ui`."
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"The database does not answer ({lines[0] if lines else type(error).__name__})."


@app.function
def shown(value):
    """A parameter or a number as short text."""
    if isinstance(value, bool) or value is None:
        return json.dumps(value)
    if isinstance(value, float):
        return f"{value:.5g}" if math.isfinite(value) else str(value).replace("nan", "NaN").replace("inf", "infinity")
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


@app.function
def link_text(address):
    """A short link for a table's cell."""
    return mo.Html(f'<a href="{html.escape(address)}" target="_blank" rel="noopener">run</a>') if address else ""


@app.function
def duration(seconds):
    """12 s, 3 min 05 s, 2 h 05 min."""
    if seconds is None:
        return ""
    minutes, rest = divmod(int(seconds), 60)
    if not minutes:
        return f"{rest} s"
    return f"{minutes} min {rest:02} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02} min"


@app.function
def mlflow_link(experiment_id, run_id=None):
    """MLflow's page of an experiment or a run; None where `orch ui` gave no address.

    A wildcard address (0.0.0.0) is where the server listens, not where a browser finds it: the name by which the
    browser reached this page is used instead.
    """
    base = os.environ.get("ORCH_MLFLOW_UI", "").rstrip("/")
    if not base or experiment_id is None:
        return None
    request = mo.app_meta().request
    if urlsplit(base).hostname in ("0.0.0.0", "::") and request is not None:
        base = f"http://{request.url['hostname']}:{urlsplit(base).port}"
    place = f"runs/{quote(run_id)}" if run_id else "runs"
    training = "workflowType=machine_learning"  # else MLflow 3 opens its pages for language-model applications
    return f"{base}/#/experiments/{quote(str(experiment_id))}/{place}?{training}"


@app.function
def sweeps_table(sweeps):
    """Every sweep with its progress, as HTML; whatever a person wrote is escaped."""
    heads = ("sweep", "state", "progress", "trials", "finished", "diverged", "failed", "started", "training time")
    numeric = ("trials", "finished", "diverged", "failed")
    head = "".join(f'<th class="{"number" if one in numeric else ""}">{one}</th>' for one in heads)
    return f'<table class="orch-sweeps"><tr>{head}</tr>{"".join(map(sweep_line, sweeps))}</table>'


@app.function
def sweep_line(sweep):
    started = f"{sweep['started_at'].astimezone():%Y-%m-%d %H:%M}" if sweep["started_at"] else "not yet"
    lines = sweep["description"].splitlines() or [""]
    name, link = html.escape(sweep["sweep"]), mlflow_link(sweep["experiment_id"])
    if link:
        name = f'<a href="{html.escape(link)}" target="_blank" rel="noopener" title="in MLflow">{name}</a>'
    counts = "".join(
        f'<td class="number {one if sweep[one] else "none"}">{sweep[one]}</td>'
        for one in ("trials", "finished", "diverged", "failed")
    )
    return (
        f'<tr><td><b>{name}</b><div class="question">{html.escape(lines[0])}</div></td>'
        f"<td>{html.escape(sweep['state'])}</td><td>{progress_bar(sweep)}</td>{counts}"
        f"<td>{started}</td><td>{duration(sweep['seconds'])}</td></tr>"
    )


@app.function
def findings_table(findings, num_trials):
    """What checks found, a line each, worst first; whatever a check says is escaped."""
    lines = "".join(finding_line(one, num_trials) for one in findings)
    return f'<table class="orch-sweeps">{lines}</table>'


@app.function
def finding_line(finding, num_trials):
    colour = {"error": "failed", "warning": "diverged", "info": "none"}[finding["severity"]]
    where = f"{finding['trials']} of {num_trials} trials" if finding["trials"] else "preflight"
    name, message, advice = (html.escape(finding[part]) for part in ("check_name", "message", "advice"))
    return (
        f'<tr><td class="{colour}">{finding["severity"]}</td><td>{name}</td><td>{where}</td>'
        f'<td class="words">{message}<div class="question">{advice}</div></td></tr>'
    )


@app.function
def progress_bar(sweep):
    """Trials by state, as one bar; its words are in the tooltip and for screen readers."""
    counts = [(state, sweep[state]) for state in COLOURS if sweep[state]]
    words = ", ".join(f"{count} {state}" for state, count in counts) or "no trials yet"
    parts = "".join(f'<i style="flex:{count};background:{COLOURS[state]}"></i>' for state, count in counts)
    return f'<div class="bar" role="img" aria-label="{words}" title="{words}">{parts}</div>'


@app.function
def finite_segments(points):
    """Splits one trial's (step, value) pairs where they are non-finite.

    Returns (segments, steps): lists of finite pairs, and the steps at which a run of non-finite values begins.
    """
    segments, steps = [], []
    for is_finite, run in groupby(points, key=lambda point: math.isfinite(point[1])):
        pairs = list(run)
        if is_finite:
            segments.append(pairs)
        else:
            steps.append(pairs[0][0])
    return segments, steps


@app.function
def trial_lines(curves, axis):
    """One line a trial. Returns (points, marks) as rows for the chart."""
    values = {number: list(rows) for number, rows in groupby(curves["points"], key=lambda point: point["trial"])}
    axis_of = axis_values(curves, axis)
    points, marks = [], []
    for trial in drawn_trials(curves):
        pairs = [(point["step"], point["value"]) for point in values.get(trial["trial"], ())]
        segments, steps = finite_segments(pairs)
        label = {"axis": axis_of[trial["trial"]], "about": about(trial)}
        for index, segment in enumerate(segments):
            line = f"{trial['trial']}/{index}"
            points += [{**label, "line": line, "step": step, "value": value, "n": 1} for step, value in segment]
        mark = mark_of(trial, segments, steps)
        if mark is not None:
            marks.append({**label, **mark})
    return points, marks


@app.function
def mark_of(trial, segments, steps):
    """Where the trial's curve ends because it diverged, at the height of its last finite value before that.

    None for a trial that stayed finite, or was never finite: then there is no height to put a mark at.
    """
    if trial["state"] != "diverged" and not steps:
        return None
    end = trial["diverged_at"] if trial["diverged_at"] is not None else min(steps, default=trial["last_step"])
    before = [(step, value) for segment in segments for step, value in segment if end is None or step <= end]
    if not before:
        return None
    what = f"diverged at step {end}" if trial["state"] == "diverged" else f"not finite at step {end}"
    return {"step": before[-1][0] if end is None else end, "value": before[-1][1], "what": what}


@app.function
def mean_lines(curves, axis):
    """One line a configuration: the mean over its seeds, with the lowest and the highest.

    A mean ends where one of its trials stops being finite: a mean of the survivors would flatter it.
    """
    points, marks = trial_lines(curves, axis)
    trials = sorted(drawn_trials(curves), key=configuration)
    axis_of = axis_values(curves, axis)
    means = []
    for key, group in groupby(trials, key=configuration):
        members = list(group)
        numbers = {str(member["trial"]) for member in members}
        end = min((step for member in members if (step := end_of(member, curves)) is not None), default=math.inf)
        mine = [one for one in points if one["line"].split("/")[0] in numbers and one["step"] < end]
        label = {"line": key, "axis": axis_of[members[0]["trial"]], "about": about(members[0], without=SEED)}
        for step, same in groupby(sorted(mine, key=lambda one: one["step"]), key=lambda one: one["step"]):
            values = [one["value"] for one in same]
            spread = {"low": min(values), "high": max(values), "n": len(values)}
            means.append({**label, "step": step, "value": math.fsum(values) / len(values), **spread})
    return means, marks


@app.function
def end_of(trial, curves):
    """The first step at which a trial is not finite; None while it is."""
    steps = [
        point["step"]
        for point in curves["points"]
        if point["trial"] == trial["trial"] and not math.isfinite(point["value"])
    ]
    return min([*steps, *([trial["diverged_at"]] if trial["diverged_at"] is not None else [])], default=None)


@app.function
def drawn_trials(curves):
    drawn = set(curves["drawn"])
    return [trial for trial in curves["trials"] if trial["trial"] in drawn]


@app.function
def configuration(trial):
    """Names a trial's parameters without its seed."""
    return json.dumps({name: value for name, value in trial["params"].items() if name != SEED}, sort_keys=True)


@app.function
def axis_values(curves, axis):
    """The axis' value of each drawn trial, by its number: all numbers, or, where one is not a number, all texts."""
    values = {
        trial["trial"]: trial["trial"] if axis == NO_AXIS else trial["params"].get(axis)
        for trial in drawn_trials(curves)
    }
    are_numbers = all(isinstance(value, int | float) and not isinstance(value, bool) for value in values.values())
    return values if are_numbers else {number: shown(value) for number, value in values.items()}


@app.function
def about(trial, without=""):
    """One line on a trial for a tooltip."""
    params = ", ".join(f"{name} {shown(value)}" for name, value in trial["params"].items() if name != without)
    return params if without else f"trial {trial['trial']}: {params}"


@app.function
def axis_colour(axis, points):
    """A colour scale that shows order where there is one: numbers from dark to light, text in distinct colours."""
    values = sorted({point["axis"] for point in points})
    viridis = alt.SchemeParams(name="viridis", extent=[0.0, 0.86])
    if any(isinstance(value, str) for value in values):
        return alt.Color("axis:N", title=axis, sort=values, scale=alt.Scale(scheme="tableau10"))
    if len(values) <= MAX_DISCRETE:
        return alt.Color("axis:O", title=axis, sort=values, scale=alt.Scale(scheme=viridis))
    spans_decades = values[0] > 0 and values[-1] / values[0] > 100
    scale = alt.Scale(scheme=viridis, type="log" if spans_decades else "linear")
    return alt.Color("axis:Q", title=axis, scale=scale)


@app.function
def curves_chart(points, marks, axis, metric, is_log):
    """Metric against step, coloured by the axis. `points` and `marks` hold finite values only."""
    visible = [point for point in points if not is_log or min(point["value"], point.get("low", math.inf)) > 0]
    scale = alt.Scale(type="log" if is_log else "linear", zero=False, nice=True)
    y_axis = alt.Axis(format="~g", tickCount=6)
    encoding = {
        "x": alt.X("step:Q", title="step", axis=alt.Axis(grid=False, tickCount=8)),
        "y": alt.Y("value:Q", title=metric, scale=scale, axis=y_axis),
    }
    colour = axis_colour(axis, visible or points)
    layers = line_layers(visible, {**encoding, "color": colour}, tooltips(axis, metric))
    if any("low" in point for point in visible):
        low = alt.Y("low:Q", title=metric, scale=scale, axis=y_axis)
        spread = alt.Chart(pd.DataFrame(visible)).mark_area(opacity=0.14)
        layers.insert(0, spread.encode(x=encoding["x"], y=low, y2="high:Q", color=colour, detail="line:N"))
    ends = [mark for mark in marks if not is_log or mark["value"] > 0]
    if ends:
        cross = alt.Chart(pd.DataFrame(ends)).mark_point(
            shape="M-1,-1L1,1M1,-1L-1,1", size=55, stroke=COLOURS["failed"], strokeWidth=2, opacity=1
        )
        layers.append(cross.encode(**encoding, tooltip=["what:N", "about:N"]))
    return calm(alt.layer(*layers).properties(width="container", height=380))


@app.function
def line_layers(points, encoding, tooltip):
    """The lines, and on them dots, which carry the tooltips and are seen only where a line has a single point."""
    lengths = Counter(point["line"] for point in points)
    # A data frame: of plain rows altair checks every single value, which takes seconds.
    table = pd.DataFrame([{**point, "is_alone": lengths[point["line"]] == 1} for point in points])
    few = len(lengths) <= 24
    lines = alt.Chart(table).mark_line(strokeWidth=1.8 if few else 1.1, opacity=0.9 if few else 0.65)
    dots = alt.Chart(table).mark_point(filled=True, size=45)
    shown_if_alone = alt.condition("datum.is_alone", alt.value(1), alt.value(0))
    return [
        lines.encode(**encoding, detail="line:N"),
        dots.encode(**encoding, opacity=shown_if_alone, tooltip=tooltip),
    ]


@app.function
def calm(chart):
    """Quiet axes, no frame, the page's own kind of font."""
    return (
        chart.configure(font="ui-sans-serif, system-ui, sans-serif")
        .configure_view(stroke=None)
        .configure_axis(labelColor="#5b6470", titleColor="#2b3138", gridColor="#eceef1", domainColor="#c9ced4")
        .configure_legend(labelColor="#2b3138", titleColor="#2b3138", symbolOpacity=1)
    )


@app.function
def tooltips(axis, metric):
    return [
        alt.Tooltip("about:N", title="what"),
        alt.Tooltip("axis:N", title=axis),
        alt.Tooltip("step:Q", title="step"),
        alt.Tooltip("value:Q", title=metric, format=".5g"),
        alt.Tooltip("n:Q", title="trials here"),
    ]


@app.function
def chart_notes(curves, points, marks, is_log):
    """What the chart cannot show, in words."""
    notes = []
    started = sum(1 for trial in curves["trials"] if trial["run_id"])
    if started > len(curves["drawn"]):
        notes.append(f"The first {len(curves['drawn'])} of {started} trials are drawn; the table has them all.")
    if marks:
        notes.append(f"✕ {len(marks)} {'trial stops' if len(marks) == 1 else 'trials stop'} being finite there.")
    drawn = {str(point["about"]) for point in (*points, *marks)}
    dark = [trial for trial in drawn_trials(curves) if trial["state"] == "diverged" and about(trial) not in drawn]
    if dark and all("low" not in point for point in points):
        notes.append(f"Never finite, so not drawn: trial {', '.join(str(trial['trial']) for trial in dark[:20])}.")
    hidden = sum(1 for point in points if is_log and point["value"] <= 0)
    if hidden:
        notes.append(f"{hidden} points at or below zero have no place on a log scale.")
    return " ".join(notes)


@app.function
def trial_rows(curves, axes, experiment_id):
    """One row a trial for the table: state, verdict, what is swept, the metric's last value, MLflow's page."""
    last = {point["trial"]: point for point in curves["points"]}  # points come in the order of their steps
    rows = []
    for trial in curves["trials"]:
        point = last.get(trial["trial"])
        rows.append(
            {
                "trial": trial["trial"],
                "MLflow": mlflow_link(experiment_id, trial["run_id"]) if trial["run_id"] else None,
                "state": trial["state"],
                "verdict": trial["verdict"] or "",
                **{axis: trial["params"].get(axis) for axis in axes},
                f"last {curves['metric']}": None if point is None else point["value"],
                "at step": None if point is None else point["step"],
                "time": duration(trial["seconds"]),
                "why": trial["reason"],
            }
        )
    return rows


@app.cell
def _():
    mo.Html("""
    <style>
      .orch-sweeps { width: 100%; border-collapse: collapse; font-size: 14px; color: #2b3138; }
      .orch-sweeps th { text-align: left; font-weight: 500; color: #6b7480; padding: 4px 12px 6px 0;
                        border-bottom: 1px solid #dfe3e8; white-space: nowrap; }
      .orch-sweeps td { padding: 9px 12px 9px 0; border-bottom: 1px solid #eef0f3; vertical-align: top;
                        white-space: nowrap; }
      .orch-sweeps td:first-child { white-space: normal; max-width: 380px; overflow-wrap: anywhere; }
      .orch-sweeps .words { white-space: normal; overflow-wrap: anywhere; }
      .orch-sweeps .number { text-align: right; font-variant-numeric: tabular-nums; }
      .orch-sweeps .none { color: #b3bac2; }
      .orch-sweeps .diverged { color: #b3641a; font-weight: 600; }
      .orch-sweeps .failed { color: #c23b3b; font-weight: 600; }
      .orch-sweeps a { color: inherit; text-decoration: none; }
      .orch-sweeps a:hover { text-decoration: underline; }
      .orch-sweeps .question { color: #6b7480; font-size: 13px; }
      .orch-sweeps .bar { display: flex; width: 170px; height: 9px; margin-top: 6px; border-radius: 5px;
                          overflow: hidden; background: #e3e5e8; gap: 1px; }
      .orch-note { color: #6b7480; font-size: 13px; }
      .orch-trouble { background: #fdf3e7; color: #7a4510; padding: 9px 14px; border-radius: 6px; font-size: 14px; }
    </style>
    """)
    return


@app.cell
def _():
    tick = mo.ui.refresh(options=["2s", "5s", "30s"], default_interval="5s")
    mo.hstack([mo.md("# Sweeps"), tick], justify="space-between", align="center")
    return (tick,)


@app.cell
def _():
    # What was read last. A cell runs again only when its part has changed, so nothing flickers or loses its place.
    get_sweeps, set_sweeps = mo.state(None)
    get_names, set_names = mo.state([])
    get_fields, set_fields = mo.state({"sweep": None, "axes": [], "metrics": []})
    get_curves, set_curves = mo.state(None)
    get_trouble, set_trouble = mo.state("")
    chosen = {
        "sweep": None,
        "axis": None,
        "metric": None,
        "lines": None,
    }  # survives a picker that is made anew
    known = {}  # the last good answers and what they answered
    return (
        chosen,
        get_curves,
        get_fields,
        get_names,
        get_sweeps,
        get_trouble,
        known,
        set_curves,
        set_fields,
        set_names,
        set_sweeps,
        set_trouble,
    )


@app.cell
def _(get_sweeps, get_trouble):
    def board():
        if get_trouble():
            words = f"{html.escape(get_trouble())} Trying again by itself; what is below may be old."
            yield mo.Html(f'<div class="orch-trouble" role="alert">{words}</div>')
        if get_sweeps():
            yield mo.Html(sweeps_table(get_sweeps()))
        elif get_sweeps() is not None:
            yield mo.md(
                "No sweep yet. Start one in a terminal: `orch sweep sweeps/zloss.yaml`. It appears here by itself."
            )

    mo.vstack(list(board()))
    return


@app.cell
def _(chosen, get_names):
    names = get_names()
    chosen["sweep"] = pick(chosen["sweep"], names, None)  # a sweep that starts later does not take its place
    sweep_picker = mo.ui.dropdown(
        options=names,
        value=chosen["sweep"],
        label="sweep",
        on_change=lambda value: chosen.update(sweep=value),
        allow_select_none=False if names else None,
    )
    return (sweep_picker,)


@app.cell
def _(chosen, get_fields):
    fields = get_fields()
    axis_picker = mo.ui.dropdown(
        options=fields["axes"],
        value=pick(chosen["axis"], fields["axes"], None),
        label="colour by",
        on_change=lambda value: chosen.update(axis=value),
        allow_select_none=False if fields["axes"] else None,
    )
    metric_picker = mo.ui.dropdown(
        options=fields["metrics"],
        value=pick(chosen["metric"], fields["metrics"], fields.get("metric")),
        label="metric",
        searchable=True,
        on_change=lambda value: chosen.update(metric=value),
        allow_select_none=False if fields["metrics"] else None,
    )
    ways = [EACH_TRIAL, MEAN_OVER_SEEDS] if SEED in fields["axes"] else [EACH_TRIAL]
    lines = mo.ui.radio(
        ways,
        value=pick(chosen["lines"], ways, EACH_TRIAL),
        inline=True,
        on_change=lambda value: chosen.update(lines=value),
    )
    return axis_picker, lines, metric_picker


@app.cell
def _():
    log_switch = mo.ui.switch(label="log scale")
    return (log_switch,)


@app.cell
def _(
    get_curves,
    get_fields,
    get_names,
    get_sweeps,
    get_trouble,
    known,
    metric_picker,
    set_curves,
    set_fields,
    set_names,
    set_sweeps,
    set_trouble,
    sweep_picker,
    tick,
):
    def look():
        """Reads the sweeps, and what is picked if it has changed. Every state is set only where it differs."""
        sweeps = read(SWEEPS)
        keep(get_sweeps, set_sweeps, sweeps)
        begun_first = sorted(sweeps, key=lambda sweep: sweep["started_at"] is None)  # else the newest first
        keep(get_names, set_names, [sweep["sweep"] for sweep in begun_first])
        sweep = next((one for one in sweeps if one["sweep"] == pick(sweep_picker.value, get_names(), None)), None)
        if sweep is None:
            keep(get_curves, set_curves, None)
            return
        if known.get("sweep") != sweep:  # running sweeps differ in their seconds at every look
            fields = {**read_fields(sweep["sweep"]), "metric": sweep["metric"]}
            known.clear()
            keep(get_fields, set_fields, fields)
        metric = pick(metric_picker.value, get_fields()["metrics"], sweep["metric"])
        if known.get("metric") != metric or "sweep" not in known:
            keep(get_curves, set_curves, {**read_curves(sweep["sweep"], metric), "about": sweep})
        known.update(sweep=sweep, metric=metric)

    def keep(get, set_to, value):
        if get() != value:
            set_to(value)

    tick.value  # noqa: B018  (naming it makes this cell run at every tick)
    try:
        look()
        keep(get_trouble, set_trouble, "")
    except psycopg.Error as error:  # away, restarting, or its views are being rebuilt: the next tick looks again
        keep(get_trouble, set_trouble, in_words(error))
    return


@app.cell
def _(axis_picker, get_names, lines, log_switch, metric_picker, sweep_picker):
    mo.stop(not get_names())
    mo.vstack(
        [
            mo.md("## One sweep"),
            mo.hstack(
                [sweep_picker, metric_picker, axis_picker, lines, log_switch],
                justify="start",
                align="center",
                gap=1.5,
                wrap=True,
            ),
        ]
    )
    return


@app.cell
def _(get_curves):
    curves = get_curves()
    return (curves,)


@app.cell
def _(axis_picker, curves, lines, log_switch):
    mo.stop(curves is None or axis_picker.value is None)

    def picture():
        draw = mean_lines if lines.value == MEAN_OVER_SEEDS and axis_picker.value != SEED else trial_lines
        points, marks = draw(curves, axis_picker.value)
        if not points and not marks:
            return mo.md(f"No finite points of {curves['metric'] or 'any metric'} yet.")
        chart = curves_chart(points, marks, axis_picker.value, curves["metric"], log_switch.value)
        notes = chart_notes(curves, points, marks, log_switch.value)
        return mo.vstack([chart, mo.Html(f'<div class="orch-note">{html.escape(notes)}</div>')])

    picture()
    return


@app.cell
def _(curves):
    mo.stop(curves is None or not curves["findings"])
    mo.Html(findings_table(curves["findings"], len(curves["trials"])))
    return


@app.cell
def _(curves, get_fields):
    mo.stop(curves is None or not curves["trials"])
    axes = [axis for axis in get_fields()["axes"] if axis != NO_AXIS]
    texts = dict.fromkeys([*axes, f"last {curves['metric']}"], shown)
    mo.ui.table(
        trial_rows(curves, axes, curves["about"]["experiment_id"]),
        format_mapping={**texts, "MLflow": link_text},
        selection=None,
        page_size=20,
        show_column_summaries=False,
        show_data_types=False,
        show_download=False,
    )
    return


if __name__ == "__main__":
    app.run()

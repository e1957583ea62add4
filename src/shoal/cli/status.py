"""`shoal status`: how a job or a run stands."""

from typing import TYPE_CHECKING, Any

import click

from shoal.cli.output import print_json, say

if TYPE_CHECKING:
    from shoal.cluster.engine import JobState
    from shoal.launch.run_status import RunStatus


@click.command()
@click.argument("job", required=False)
@click.option(
    "--on", default="local", show_default=True, metavar="ENGINE", help="Without JOB: whose jobs."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def status(job: str | None, on: str, as_json: bool) -> None:
    """Show how JOB stands: a run directory, or engine:id. Without it, all jobs of an engine.

    \b
    shoal status local:3
    shoal status runs/charlm-small-1

    Members, generation, step, loss and goodput are read from the run directory, which may be that
    of a plain `shoal train`; goodput is the share of the time since the run began that went into
    its steps. States: queued, running, stopped, done, failed. Exit codes: 0 shown, 2 there is no
    such job. `exit_code` in the JSON object of a job is the job's own, or null.
    """
    from pathlib import Path

    from shoal.launch.engines import find_job, make_engine, state_of
    from shoal.launch.run_status import RunStatus, read_run

    if job is not None:
        known, run = state_of(find_job(job))
        if as_json:
            print_json(fields_of(known, run), known.exit_code)
        else:
            say(in_words(known, run))
        return
    jobs = make_engine(on).jobs()
    runs = [read_run(Path(one.run_dir)) if one.run_dir else RunStatus() for one in jobs]
    if as_json:
        rows = [fields_of(*pair) for pair in zip(jobs, runs, strict=True)]
        print_json({"jobs": rows})
    else:
        say("\n\n".join(in_words(*pair) for pair in zip(jobs, runs, strict=True)) or "no jobs")


def fields_of(job: "JobState", run: "RunStatus") -> dict[str, Any]:
    """What `--json` gives of a job. Pure."""
    return {
        "job": job.job,
        "state": job.state,
        "name": job.name,
        "run_dir": job.run_dir,
        "priority": job.priority,
        "members": [
            {"rank": one.rank, "server": one.server, "pid": one.pid, "host": one.host}
            for one in run.members
        ],
        "generation": run.generation,
        "step": run.step,
        "steps": run.num_steps,
        "loss": run.loss,
        "goodput": run.goodput,
        "plan": run.plan,
        "checkpoint": run.checkpoint,
        "reason": job.reason,
        "exit_code": job.exit_code,
    }


def in_words(job: "JobState", run: "RunStatus") -> str:
    """The same for people. Pure."""
    code = "" if job.exit_code is None else f", exit code {job.exit_code}"
    why = f": {job.reason}" if job.reason else ""
    lines = [f"{job.job or job.run_dir} {job.state}{code}{why}", f"run directory: {job.run_dir}"]
    if run.num_steps:
        loss = "" if run.loss is None else f", loss {run.loss:.4f}"
        lines.append(f"step {run.step} of {run.num_steps}{loss}")
    if run.goodput is not None:
        lines.append(f"goodput: {100 * run.goodput:.0f} % of the time went into steps")
    if run.members:
        ranks = sum(one.server is None for one in run.members)
        servers = len(run.members) - ranks
        told = f"{ranks} ranks" + (f" and {servers} servers" if servers else "")
        lines.append(f"members: {told}, in generation {run.generation}, plan {run.plan!r}")
    if run.checkpoint:
        lines.append(f"checkpoint: {run.checkpoint}")
    return "\n".join(lines)

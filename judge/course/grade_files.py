"""Points as Gradescope's results.json (gradescope-autograders.readthedocs.io) and JUnit's XML."""

import json
import re
from collections.abc import Iterator, Sequence
from xml.etree import ElementTree

from shakespeare.judge.course.checks import Result
from shakespeare.judge.course.exercises import Exercise

Checked = Sequence[tuple[Exercise, Result]]
UNFIT = re.compile("[^\t\n\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")  # for XML


def stages(exercise: Exercise, result: Result) -> Iterator[tuple[str, str, str, float]]:
    """Name, status (passed, failed or skipped), what is said, and seconds of each stage."""
    names = list(exercise.stages.values())
    passed = len(result.passed)
    for name, lap in zip(names, result.laps):
        yield name, "passed", result.note if name == names[-1] else "", lap
    for name in names[passed : passed + 1]:
        message = UNFIT.sub("?", result.failed)  # a file's own message may hold anything
        yield name, "failed", message, result.seconds - sum(result.laps)
    for name in names[passed + 1 :]:
        yield name, "skipped", "a stage before it is not passed", 0.0


def gradescope(checked: Checked) -> str:
    """Gradescope's results.json: a test for each stage, and a leaderboard of the shares of the limit."""
    tests = []
    leaderboard = []
    for exercise, result in checked:
        points = result.full_points / result.stages
        for name, status, message, _ in stages(exercise, result):
            score, status = (points, status) if status == "passed" else (0, "failed")
            tests.append(
                {
                    "name": f"{result.name}: {name}",
                    "output": message,
                    "visibility": "visible",
                    "score": score,
                    "max_score": points,
                    "status": status,
                }
            )
        if result.share is not None:
            share = round(100 * result.share, 1)
            name = f"{result.name}, % of the FMA peak"
            leaderboard.append({"name": name, "value": share, "order": "desc"})
    seconds = round(sum(result.seconds for _, result in checked), 1)
    return json.dumps({"tests": tests, "leaderboard": leaderboard, "execution_time": seconds}, indent=1)


def junit(checked: Checked) -> str:
    """JUnit's XML: a suite for each exercise, a case for each stage."""
    root = ElementTree.Element("testsuites")
    for exercise, result in checked:
        found = list(stages(exercise, result))
        failed, skipped = (str(sum(s[1] == status for s in found)) for status in ("failed", "skipped"))
        attributes = {
            "tests": str(len(found)),
            "failures": failed,
            "errors": "0",
            "skipped": skipped,
            "time": f"{result.seconds:.3f}",
        }
        suite = ElementTree.SubElement(root, "testsuite", attributes, name=result.name)
        for name, status, message, seconds in found:
            attributes = {"classname": result.name, "name": name, "time": f"{seconds:.3f}"}
            case = ElementTree.SubElement(suite, "testcase", attributes)
            if status != "passed":
                ElementTree.SubElement(case, "failure" if status == "failed" else status, message=message)
            elif message:
                ElementTree.SubElement(case, "system-out").text = message
    ElementTree.indent(root)
    return ElementTree.tostring(root, "unicode")

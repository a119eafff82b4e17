"""The `placewright` command: mounts the commands of planner and server, holds no logic."""


def main() -> None:
    raise SystemExit("placewright has no commands yet")

"""`course-llm pretrain`: trains the course's model by a recipe."""

import argparse


def add(commands) -> None:
    """Adds the command."""
    pretrain = commands.add_parser("pretrain", help="train the course's model by a recipe", add_help=False)
    pretrain.add_argument("rest", nargs=argparse.REMAINDER)
    pretrain.set_defaults(
        run=run_pretrain, interrupted="the last checkpoint is kept; --resume goes on from it"
    )


def run_pretrain(arguments: argparse.Namespace) -> int:
    """`course-llm pretrain`: see `course_llm.trainer`."""
    from course_llm import trainer

    return trainer.main(arguments.rest)

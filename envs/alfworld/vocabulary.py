"""The phrases and words of the generated games, for the word-level tokenizer of the quickstart model."""

from __future__ import annotations

from envs.alfworld import household

MAX_NUMBER = 6

_PHRASES = (
    # prompts and replies
    "your task is to :",
    "history :",
    "now :",
    "actions :",
    "hint :",
    "outcome :",
    "write the skill",
    "steps left out",
    '{"episode_summary": "',
    '", "episode_skill": "',
    '"}',
    "=>",
    # observations
    "you are in the middle of a room. looking quickly around you, you see a",
    "you arrive at",
    ". on the",
    ", you see nothing.",
    ", you see a",
    ". in it, you see a",
    ". in it, you see nothing.",
    ", and a",
    ", a",
    "is closed.",
    "is open",
    ". the",
    "you open the",
    "you close the",
    "you pick up the",
    "from the",
    "you move the",
    "to the",
    "you clean the",
    "you heat the",
    "you cool the",
    "using the",
    "you turn on the",
    "nothing happens.",
    "you are facing the",
    ". next to it, you see nothing.",
    "you are carrying: a",
    "you are not carrying anything.",
    # commands
    "/ go to",
    "go to",
    "/ take",
    "/ move",
    "/ open",
    "/ close",
    "/ clean",
    "/ heat",
    "/ cool",
    "/ use",
    # thoughts and skills
    "search for",
    "search for second",
    "open it to look for",
    "open it to put",
    "i see",
    ", take it .",
    "put down",
    "take it ,",
    "do not forget to",
    "do not forget the second",
    "then move it to",
    "repeat with the second",
    "it with",
    "is at",
    "use desklamp now .",
    "go to desklamp .",
    "look for",
    "elsewhere .",
    "now .",
)
_WORDS = tuple(
    """
    <think> </think> <action> </action> look inventory help examine open close take move from to clean heat
    cool with use nothing none success failure put some in on a and two find them at under the desklamp it
    hot second first bring avoid , . ; / : ( ) task is your then forget do not slice sliced this that there
    special about normal
    """.split()
)


def classes() -> list[str]:
    """Class names of all receptacles and objects as the texts spell them."""
    receptacles = {name for places in household.RECEPTACLES_FOR.values() for name in places} | set(
        household.MAX_OF_A_KIND
    )
    return sorted({name.lower() for name in receptacles | set(household.HABITS) | {household.LAMP}})


def phrases() -> list[str]:
    """Fixed wordings that become one token each."""
    return [phrase.replace(" :", ":") for phrase in _PHRASES]


def words() -> list[str]:
    return [*_WORDS, *classes(), *(str(number) for number in range(100))]

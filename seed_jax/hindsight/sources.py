"""The skill source of a run: who gets which skill, as a teacher or in the policy's own prompt, and the controls.

Sources: `self_hindsight` and `group_reflection` (the policy writes, about one episode or about two of a group, see
analyzer.py), `external_hindsight` (another model writes), those of evidence.py (nobody writes), `static_library` and
`skill_bank` (written beforehand). All but the last two belong to a finished episode, so only those of a library can be
read while an episode is played (`hindsight.at_rollout`, `hindsight.at_eval`).

Controls replace each skill and leave all else alone: `wrong_skill` by that of another task (of the same host, and of
another family where there is one), `placebo` by a text of equal length that says nothing. A method that gains as much
from them does not learn from the skills' content. `true_skill`: what the environment knows to be right, an upper bound.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

from seed_jax.hindsight.analyzer import analyze_elsewhere
from seed_jax.hindsight.bank import load_bank
from seed_jax.hindsight.client import Client
from seed_jax.hindsight.evidence import SOURCES as EVIDENCE
from seed_jax.hindsight.evidence import Solve, Truth, give_evidence
from seed_jax.hindsight.library import Library, SkillError, load_folder
from seed_jax.hindsight.prompts import Images, encode_with_skills, skill_block
from seed_jax.images import shown
from seed_jax.types import Episode, Skill

LIBRARIES = {"static_library": load_folder, "skill_bank": load_bank}
WRITERS = ("self_hindsight", "external_hindsight", "group_reflection")
_FILLER = "There is nothing special about this .".split()


def load_library(hindsight) -> Library | None:
    """The library that a config names, None if its source has none. Raises SkillError."""
    load = LIBRARIES.get(hindsight.source)
    return load(hindsight.library) if load else None


class Skills:
    """What a run knows about its skills. Everything is fixed at the start; skills themselves live in the episodes.

    families: task families that will be asked for (checked against the library).
    solve: id of a task -> the commands that solve it, None where the environment does not tell (evidence.solver).
    truth: id of a task -> its true skill, likewise (evidence.truth).
    """

    def __init__(
        self,
        config,
        tokenizer,
        families: Iterable[str] = (),
        solve: Solve | None = None,
        truth: Truth | None = None,
    ):
        self.hindsight, self.style, self.tokenizer = config.hindsight, config.env.prompt, tokenizer
        self.source, self.control = config.hindsight.source, config.hindsight.control
        self.library = load_library(config.hindsight)
        self.per_turn = self.library is not None and config.hindsight.retrieval == "keyword_full_prompt"
        self.client, self.solve, self.truth = None, solve, truth
        if self.control == "true_skill" and truth is None:
            raise SkillError(
                f"hindsight.control = 'true_skill': the environment {config.env.name!r} does not tell what would solve "
                "a task; choose another control"
            )
        if self.source == "ground_truth" and solve is None:
            raise SkillError(
                f"hindsight.source = 'ground_truth': the environment {config.env.name!r} does not tell solutions; "
                "choose another source"
            )
        if self.source == "external_hindsight":
            h = config.hindsight
            self.client = Client(h.api_url, h.api_model, h.api_timeout_s, h.api_workers)
        if self.library:
            families = sorted(set(families))
            self.library.check(families, config.hindsight.retrieval)
            self._check_sizes(families)
        self._placebo = functools.cache(lambda text: placebo(text, self._length))

    @property
    def label(self) -> str:
        """The source's name in metrics, with its control."""
        return self.source if self.control == "none" else f"{self.source}+{self.control}"

    @property
    def at_eval(self) -> tuple[bool, ...]:
        """Whether the panel is played without and with skills; the first is the headline."""
        return {"no": (False,), "yes": (True,), "both": (False, True)}[self.hindsight.at_eval]

    def find(self, episode: Episode) -> Skill | None:
        """The library's skill for an episode, its control applied; None if there is none for its task."""
        names = self.library.names(episode.family, episode.goal, self.hindsight.retrieval)
        if self.control == "wrong_skill":
            other = self.library.other(names)
            return Skill("", self.library.text([other])) if other else None
        text = self.library.text(names)
        return Skill("", self._placebo(text) if self.control == "placebo" else text) if text else None

    def give(self, episode: Episode, place: int, share: float) -> None:
        """Before the first turn: lets the policy read a skill if `place` (in its group) is within the share."""
        if reads_skill(place, share):
            episode.given = self.find(episode)

    def to_analyze(self, episodes: Sequence[Episode]) -> list[Episode]:
        """What the policy itself has to read and write about: the episodes, or one pair of each mixed group."""
        if self.source == "group_reflection":
            return contrasts(episodes)
        return list(episodes) if self.source == "self_hindsight" else []

    def assign(self, episodes: Sequence[Episode], analyzed: Sequence[Episode] = ()) -> Counter:
        """After the rollout: the teacher's skills. The policy has written its own ones into `analyzed`
        (`to_analyze`); the others come here.

        Episodes that were played with a skill get none, since their teacher would read what they read; with
        `hindsight.teach_readers` their teacher reads the bare prompt.
        """
        counts: Counter = Counter()
        if self.source == "group_reflection":
            share_reflections(episodes, analyzed)
        if self.source in EVIDENCE:
            give_evidence(self.source, episodes, self.style, self.solve)
        if self.client:
            counts += analyze_elsewhere(self.client, self.tokenizer, episodes, self.hindsight, self.style)
        if self.library:
            for episode in episodes:
                if episode.turns and not episode.error and not episode.given:
                    episode.skill = self.find(episode)
                    episode.skill_error = "" if episode.skill else "none_for_task"
                elif episode.given and self.hindsight.teach_readers:
                    episode.skill = Skill("", "")
            return counts
        if self.source in WRITERS:
            for episode in episodes:
                episode.skill = _routed(episode.skill, self.hindsight)
        if self.control == "wrong_skill":
            swap_skills(episodes)
        elif self.control == "placebo":
            for episode in episodes:
                episode.skill = episode.skill and self.placebo_of(episode.skill)
        elif self.control == "true_skill":
            for episode in episodes:
                episode.skill = episode.skill and Skill("", self.truth(episode.task_id))
        return counts

    def placebo_of(self, skill: Skill) -> Skill:
        """Filler words in the place of each of its texts, as long as these."""
        text = skill.text and self._placebo(skill.text)
        return skill._replace(text=text, steps=tuple((turn, self._placebo(step)) for turn, step in skill.steps))

    def encode(
        self, prompts: Sequence[str], skills: Sequence[Skill], images: Sequence[Images] | None = None
    ) -> list[list[int]]:
        """Prompts, with the images of each, and their skills -> token ids."""
        return self.encode_texts(prompts, [skill.text or "" for skill in skills], images)

    def encode_texts(
        self, prompts: Sequence[str], texts: Sequence[str], images: Sequence[Images] | None = None
    ) -> list[list[int]]:
        """As `encode`, for the texts of single turns. An empty one leaves the prompt bare."""
        if self.per_turn:
            found = [self.library.text(self.library.by_keywords(prompt)) for prompt in prompts]
            texts = [new if old else "" for new, old in zip(found, texts, strict=True)]
        where = self.style, self.hindsight.placement, self.heading
        return encode_with_skills(self.tokenizer, prompts, texts, *where, images=images)

    def had_room(self, episode: Episode) -> list[bool]:
        """Of each turn of an episode that was played with its `given` skill, whether the prompt had room for it."""
        turns = episode.turns
        images = [shown([turn]) for turn in turns]
        texts = [episode.given.at(number) or "" for number in range(len(turns))]
        read = self.encode_texts([turn.prompt for turn in turns], texts, images if any(images) else None)
        return [turn.prompt_ids == ids for turn, ids in zip(turns, read, strict=True)]

    @property
    def heading(self) -> str:
        return "library" if self.library else "evidence" if self.source in EVIDENCE else "hindsight"

    def teacher_prompts(
        self, episodes: Sequence[Episode], max_tokens: int, counts: Counter
    ) -> dict[tuple[int, int], list[int]]:
        """(place of the episode, turn number) -> teacher prompt ids, for every turn of an episode with a skill.

        A turn whose prompt with the skill exceeds `max_tokens` gets none. Counts: taught_turns, teacher_overflow.
        """
        texts = {
            (e, t): text
            for e, episode in enumerate(episodes)
            if episode.skill
            for t in range(len(episode.turns))
            if (text := episode.skill.at(t)) is not None
        }
        turns = [episodes[e].turns[t] for e, t in texts]
        images = [shown([turn]) for turn in turns]
        prompts, skills = [turn.prompt for turn in turns], list(texts.values())
        encoded = dict(zip(texts, self.encode_texts(prompts, skills, images), strict=True))
        kept = {key: ids for key, ids in encoded.items() if len(ids) <= max_tokens}
        counts["taught_turns"] += len(kept)
        counts["teacher_overflow"] += len(encoded) - len(kept)
        return kept

    def metrics(self, episodes: Sequence[Episode], counts: Counter, teaches: bool) -> dict[str, float]:
        """Shares of the played episodes: whose teacher had a skill (by source), and that were played with one."""
        played, metrics = [episode for episode in episodes if episode.turns and not episode.error], {}
        if self.source == "none" or not played:
            return {}
        if teaches:
            taught = sum(episode.skill is not None for episode in played)
            metrics |= {f"skill/coverage/{self.label}": taught / len(played)}
            metrics |= {"skill/teacher_overflow": counts["teacher_overflow"]}
        if self.hindsight.at_rollout:
            given = sum(episode.given is not None for episode in played)
            metrics |= {"skill/given": given / len(played), "skill/given_overflow": counts["given_overflow"]}
        return metrics

    def _length(self, text: str) -> int:
        return len(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _check_sizes(self, families: Sequence[str]) -> None:
        """Every skill that a task may get by itself must fit; several at once (keywords) may not, and are counted."""
        names = list(self.library.skills)
        if self.hindsight.retrieval == "task_type" and families and self.control == "none":
            names = [name for name in names if any(name in self.library.names(f, "", "task_type") for f in families)]
        sets = [names] if self.hindsight.retrieval == "all" else [[name] for name in names] or [[]]
        for chosen in sets:
            tokens = self._length(skill_block(self.library.text(chosen), self.style, self.heading))
            if tokens > self.hindsight.max_skill_tokens:
                raise SkillError(
                    f"{self.library.path}: the skill {' + '.join(chosen) or 'for every task'} takes {tokens} tokens, "
                    f"hindsight.max_skill_tokens = {self.hindsight.max_skill_tokens}; raise it (and the row sizes in "
                    "pack that it asks for), or shorten the text"
                )


def _routed(skill: Skill | None, hindsight) -> Skill | None:
    """What of a written skill the teacher reads, by hindsight.granularity."""
    if skill is None or hindsight.granularity == "episode":
        return skill and skill._replace(steps=())
    steps = skill.steps[: hindsight.step_skills]
    if hindsight.granularity == "episode_step":
        return skill._replace(steps=steps)
    return skill._replace(text=None, steps=steps) if steps else None


def contrasts(episodes: Sequence[Episode]) -> list[Episode]:
    """Of every group with both outcomes its first lost episode, with its first won one as `peer`. Copies."""
    groups: dict[int, dict[bool, Episode]] = defaultdict(dict)
    for episode in episodes:
        if episode.turns and not episode.error:
            groups[episode.group].setdefault(episode.won, episode)
    return [dataclasses.replace(pair[False], peer=pair[True]) for pair in groups.values() if len(pair) == 2]


def share_reflections(episodes: Sequence[Episode], analyzed: Sequence[Episode]) -> None:
    """What was written about a pair goes to its whole group; groups with one outcome get nothing."""
    written = {episode.group: episode for episode in analyzed}
    for episode in episodes:
        if episode.turns and not episode.error:
            source = written.get(episode.group)
            episode.skill = source.skill if source else None
            episode.skill_error = source.skill_error if source else "no_contrast"


def reads_skill(place: int, share: float) -> bool:
    """Whether episode `place` of its group is among the share that reads a skill: .5 is every second one, 1 all."""
    below = lambda count: math.floor(count * share + 1e-9)  # noqa: E731
    return below(place + 1) > below(place)


def swap_skills(episodes: Sequence[Episode]) -> None:
    """Each skill becomes that of the next episode (in order, from the start behind the last) of another task family,
    or where all are of one, with another goal."""
    written = [episode.skill for episode in episodes]
    for place, episode in enumerate(episodes):
        if written[place] is None:
            continue
        later = [i % len(episodes) for i in range(place + 1, place + len(episodes))]
        others = [i for i in later if written[i] and episodes[i].goal != episode.goal]
        other = next((i for i in others if episodes[i].family != episode.family), others[0] if others else None)
        episode.skill = None if other is None else written[other]
        episode.skill_error = "no_other_task" if other is None else ""


def placebo(text: str, length) -> str:
    """A text without content, as long as `text` by `length` (tokens of a text) or as near as its words allow."""
    target = length(text)

    def words(count: int) -> str:
        return " ".join(_FILLER[i % len(_FILLER)] for i in range(count))

    low, high = 1, max(1, 2 * target)
    while low < high:  # the shortest that is not shorter
        middle = (low + high) // 2
        low, high = (low, middle) if length(words(middle)) >= target else (middle + 1, high)
    return words(low)

"""Every field of a run, with its unit and meaning. Other config files start from this one and change a few values.

The values are those of the published method on ALFWorld (arXiv 2607.14777). Only `model.init` has no default.
A field that names one of several choices lists them all; `seed_jax.config.check` refuses everything else.
"""

from __future__ import annotations

from pathlib import Path

from ml_collections import ConfigDict

SKILLS = Path(__file__).resolve().parent / "skills"


def get_config() -> ConfigDict:
    """Returns the full config. Its fields can be changed but, since it is locked, no unknown field can be added."""
    config = ConfigDict()
    config.method = "seed"  # a name for logs and reports; the fields below decide what is computed
    config.seed = 0  # the seed of everything random: task order, sampling, shuffling
    config.iterations = 150  # iterations to train in total; one is rollout, analysis, update
    config.old_logprobs = "recompute"  # log-probs in the policy ratio: "recompute" by trainer | of "sampler"
    config.model = _model()
    config.mesh = _mesh()
    config.env = _env()
    config.rollout = _rollout()
    config.hindsight = _hindsight()
    config.adv = _advantage()
    config.loss = _loss()
    config.distill = _distill()
    config.optim = _optim()
    config.pack = _pack()
    config.eval = _eval()
    config.checkpoint = _checkpoint()
    config.log = _log()
    config.annotate = _annotate()
    config.sft = _sft()
    return config.lock()


def _model() -> ConfigDict:
    model = ConfigDict()
    model.init = ""  # directory in Hugging Face format (config, *.safetensors, tokenizer) | "org/name" on its hub
    model.dtype = "bfloat16"  # type of activations: "float32" | "bfloat16"; master weights are always float32
    model.freeze_vision = False  # leave the vision tower, if there is one, as it is (the published runs train it)
    model.remat = "full"  # what the backward pass computes again: "none" | "dots" (all but matmuls) | "full"
    return model


def _mesh() -> ConfigDict:
    mesh = ConfigDict()
    mesh.fsdp = -1  # devices that split the batch and the weights; -1 = all that `tensor` leaves
    mesh.tensor = 1  # devices that split heads and ffn of every layer; -1 = all that `fsdp` leaves
    mesh.decode_tensor = 0  # the same when decoding, devices of one host; 0 = as mesh.tensor
    mesh.host_timeout_s = 100.0  # many hosts: seconds without a sign of life from one, then all others end
    return mesh


def _env() -> ConfigDict:
    env = ConfigDict()
    env.name = "alfworld"  # "alfworld" | "webshop" | "search" | "sokoban" | "ezpoints"
    # "generated" = made from seeds, no download | "official" = the games in $ALFWORLD_DATA (alfworld) | a directory of
    # games (alfworld), of WebShop's files (webshop), of questions and their corpus (search), of levels (sokoban)
    env.data = "generated"  # where games come from
    env.data_fraction = 1.0  # share of every family's training tasks to use; with one seed a smaller lies in a larger
    env.size = "mini"  # size of a generated game; ignored for official games
    # "auto" = ours where it equals TextWorld's, else TextWorld's | "native" = ours (pure Python) | "textworld" = the
    # real one with cached translations | "pip" = the real one as the package has it, a thousand times slower than ours
    env.engine = "auto"  # what plays the games
    # "released" (wording of the published runs) | "compact" (short, for small models) | "react" (one transcript)
    env.prompt = "released"  # style of the prompts
    env.max_steps = 30  # commands in an episode; then it counts as lost
    env.history = 5  # past turns shown in the prompt
    env.train_tasks = 3553  # tasks to train on (3553 = the official train split)
    env.workers = 0  # worker processes that run the games; 0 = none for our engine, one a core for TextWorld's
    env.step_timeout_s = 60.0  # seconds a worker may take for one reset or command before it is restarted
    # webshop, sokoban, ezpoints
    # webshop: form of a page, "text" = one line with [SEP] | "text_rich" = lines with marked buttons; sokoban and
    # ezpoints: "text" | "image" = a picture, for models with a vision tower
    env.observation = "text"  # what the policy sees
    # webshop: the selected options are not marked; sokoban, ezpoints: replies are read leniently
    env.compat = False  # as the published environment does it
    # webshop
    env.goals = "synthetic"  # "synthetic" = from attributes and options of products | "human" = written by people
    # search
    env.retriever = "bm25"  # "bm25" and "dense" = in this process, over the data's corpus | "http" = a server
    env.retriever_url = ""  # http: its addresses, separated by commas | dense: directory of the encoder
    env.topk = 3  # passages that a search returns
    env.passage_chars = 1200  # characters that a passage may have in a prompt; all of a search: env.block_chars
    env.block_chars = 4000  # see passage_chars
    env.information = "plain"  # form of what a search returns: "plain" | "json" (escaped, as published)
    # sokoban, ezpoints: an image of fewer pixels is enlarged to so many, before its sides become multiples of 28
    env.min_pixels = 65536  # 65536 = as published | 0 = it is not
    # sokoban, generated rooms
    env.rows = 6  # of a room, walls included
    env.columns = 6  # see rows
    env.boxes = 1  # in a room
    env.search_depth = 30  # moves that the generator plays backwards at most
    env.min_moves = 1  # in the shortest solution of a room, at least
    env.max_moves = 0  # at most; 0 = env.max_steps
    # 28 with env.min_pixels = 0: a cell is a token, instead of two and a quarter as published
    env.tile_px = 16  # pixels of a cell in a picture: 16 = as published | 28 = those of a token
    # ezpoints
    env.font = ""  # file of the font in pictures; "" = the one that Pillow brings
    return env


def _rollout() -> ConfigDict:
    rollout = ConfigDict()
    rollout.tasks = 16  # tasks in an iteration, balanced over task families
    rollout.group = 8  # episodes of each task
    rollout.temperature = 1.0  # sampling temperature of training episodes
    rollout.max_response_tokens = 512  # tokens of a response, end token included
    rollout.max_prompt_tokens = 2048  # tokens of a prompt; a longer one loses its oldest turns and is counted
    # of all hosts together; each takes cache for the longest prompt and response
    rollout.batch = 64  # requests decoded together
    rollout.analysis_batch = 8  # the same for requests of the analyzer, whose slots are longer
    rollout.prompt_bucket = 32  # prompt lengths are padded up to a multiple of this many tokens, to compile rarely
    # "off" | "mask" = groups of equal rewards are left out of the loss | "dynamic" = and replaced by new ones
    rollout.group_filter = "off"  # which groups the update learns from
    rollout.max_rounds = 10  # dynamic: at most so many times rollout.tasks tasks are played in an iteration
    rollout.require_think = True  # a response without <think> ... </think> is an invalid action
    # "template" = as it is by default | "on" | "off" = Qwen3's template then writes an empty thought before the reply
    rollout.thinking = "template"  # the chat template's enable_thinking, for acting, analyzing and teaching
    return rollout


def _hindsight() -> ConfigDict:
    hindsight = ConfigDict()
    # "none" | "self_hindsight" = the policy writes one after each episode | "external_hindsight" = another model does
    # | "group_reflection" = the policy compares a lost and a won episode of each group | "peer_success" = the commands
    # of another episode of the group that won | "env_feedback" = at each turn, what the environment answered to it |
    # "peer_feedback" = both | "ground_truth" = the commands that solve the task, where the environment tells them |
    # "static_library" = a folder of markdown files | "skill_bank" = JSON in the form of SkillRL
    hindsight.source = "self_hindsight"  # where skills come from
    hindsight.library = str(SKILLS / "alfworld")  # folder of skills; for a skill_bank its bank.json, or a JSON file
    # "task_type" = by the task's family | "keyword" = by words of its goal | "keyword_full_prompt" = by words of the
    # whole prompt, anew every turn (as published baselines do; keywords then also meet in observations) | "all"
    hindsight.retrieval = "task_type"  # which of a library's skills a task gets, once an episode
    # "none" = itself | "wrong_skill" = another task's, of another family if there is one | "placebo" = filler words |
    # "true_skill" = what the environment knows to be right
    hindsight.control = "none"  # instead of each skill
    # "episode" | "step" = for the turns that the analyzer picks only | "episode_step" = for these, else the episode's
    hindsight.granularity = "episode"  # what a written skill is for
    hindsight.step_skills = 5  # skills of single turns in an episode, at most
    hindsight.max_analysis_tokens = 16384  # tokens of the prompt that shows an episode to the analyzer
    hindsight.max_skill_tokens = 256  # tokens the analyzer may write, and that a skill may add to a prompt
    hindsight.stop_json = False  # stop the analyzer at the brace that closes the first JSON object of its answer
    hindsight.min_words = 3  # a skill of fewer words is dropped and counted
    # "after_task_line" | "user_prefix" = first in the user message | "system" = as system message
    # | "before_template" = before the whole chat
    hindsight.placement = "after_task_line"  # where a skill stands in a prompt
    # A second attempt plays a task again with the skill just written about a first one; both together are rollout.group
    hindsight.second_attempts = 0.0  # share of each group's episodes that are second attempts
    hindsight.train_second = False  # second attempts are trained on too, compared with one another
    hindsight.at_rollout = 0.0  # share of each group's training episodes that are played with a library's skill
    hindsight.teach_readers = False  # the teacher of an episode that was played with a skill reads the prompt without
    hindsight.at_eval = "no"  # "no" | "yes" = the panel is played with a library's skills | "both" = without and with
    hindsight.min_coverage_iterations = 3  # stop with an error after so many iterations without any skill; 0 = never
    # external_hindsight: a service with the OpenAI protocol. Its key is read from the variable SEED_JAX_API_KEY.
    hindsight.api_url = ""  # base URL, such as "http://localhost:8000/v1"
    hindsight.api_model = ""  # the model's name at that service
    hindsight.api_timeout_s = 120.0  # seconds for one answer
    hindsight.api_workers = 16  # requests in flight
    return hindsight


def _advantage() -> ConfigDict:
    adv = ConfigDict()
    # "grpo" = reward relative to the group that shares a task | "drgrpo" = without its standard deviation | "rloo" =
    # relative to the others | "gigpo" = grpo + the same for turns from equal observations | "hgpo" = average over all
    # lengths of equal history | "reinforce_pp" = relative to the whole batch | "zero" = no reward signal
    adv.kind = "grpo"  # how rewards become advantages
    adv.stat = "rows"  # group statistics over turn "rows" (long episodes weigh more) | over "episodes"
    adv.normalize = "std"  # "std" = (reward - mean) / (std + eps) | "mean" = reward - mean
    adv.eps = 1e-6  # added to the group's standard deviation
    adv.std_floor = 0.0  # the standard deviation counts at least this much, in units of reward
    adv.invalid = "format"  # a turn is invalid if its reply breaks the "format" | also if its command is "inadmissible"
    adv.invalid_penalty = "in_score"  # penalty: "in_score" = before normalisation | "after_norm" = from the advantage
    adv.penalty = 0.1  # penalty of an invalid turn, in units of reward (in_score) or of the advantage (after_norm)
    adv.step_weight = 1.0  # gigpo: weight of the advantage of single turns
    adv.history_power = 1.0  # hgpo: k equal observations weigh (k + 1)^history_power, k up to env.history + 1
    adv.base_weight = 0.0  # hgpo: weight of the episode's advantage in the average
    adv.gamma = 0.95  # gigpo, hgpo: discount of rewards a turn later
    adv.anchor_similarity = 1.0  # gigpo, hgpo: observations with this difflib ratio are the same; 1 = equal texts only
    adv.overlong_buffer = 0  # tokens before max_response_tokens where a reply starts to cost reward; 0 = never
    adv.overlong_penalty = 1.0  # what a reply of max_response_tokens costs, in units of reward
    # "none" | "add_gap" = A + weight * gap | "mult_clip" = A times clip(exp(sign(A) * gap)), blended in by the weight |
    # "add_gate" = A + weight * sigmoid(beta * gap)
    adv.shape = "none"  # what the teacher does to the advantage of each token
    adv.shape_weight = 0.0  # the weight in it; distill.schedule applies to it
    # "token" = teacher log-prob - student log-prob | "turn" = its mean over the turn, standardised in the group |
    # "running" = sum of these means over the episode so far | "teacher" = teacher log-prob, centred in the turn, scaled
    adv.shape_signal = "token"  # the gap in it
    adv.shape_floor = 0.1  # turn: the standard deviation counts at least this much, in nats
    # "none" = 1 | "agreement" = sigmoid(beta * (success of turns that agree with the teacher - that of the others))
    adv.shape_value = "none"  # factor of the weight, by group
    adv.shape_clip = 0.2  # mult_clip: the factor stays in [1 - shape_clip, 1 + shape_clip]
    return adv


def _loss() -> ConfigDict:
    loss = ConfigDict()
    # "ppo_clip" | "gspo" = one ratio a turn | "gspo_token" = the same with advantages that differ between tokens |
    # "reinforce" = no ratio, no clip
    loss.kind = "ppo_clip"  # policy loss
    # "token_mean" = over all tokens | "seq_mean_token_mean" = over turns, of means over tokens | "seq_mean_token_sum" =
    # over turns, of sums | "seq_mean_token_sum_norm" = that / max_response_tokens
    loss.aggregation = "token_mean"  # mean of policy, KL and entropy terms, always over the whole mini-batch
    loss.rl_coef = 1.0  # weight of the policy loss
    loss.clip_low = 0.2  # the policy ratio is clipped to [1 - clip_low, 1 + clip_high]
    loss.clip_high = 0.2  # see clip_low
    loss.dual_clip = 3.0  # ppo_clip: bound of the loss of a negative advantage, in multiples of it
    loss.importance_cap = 0.0  # cap of the weight exp(trainer - sampler log-prob) of a token; 0 = no such weight
    loss.kl_coef = 0.01  # weight of the divergence from the initial weights
    loss.kl_type = "k3"  # "k3" | "k1" | "k2", its estimates (objectives/policy_loss.py) | "full" = exact, as full_*
    # the policy is trained as the analyzer: log-prob of its skills, times the gap that they make on won episodes
    loss.gen_coef = 0.0  # weight of that
    # "gap" = as above | "second_attempts" = how much more often these win than first ones (hindsight.second_attempts)
    loss.gen_reward = "gap"  # what a skill is rewarded for
    loss.entropy_coef = 0.001  # weight of the entropy bonus
    return loss


def _distill() -> ConfigDict:
    """The teacher is the policy (see distill.teacher) with a skill in its prompt, scoring the policy's own tokens."""
    distill = ConfigDict()
    # "none" | "gap_nll" = gap | "score", "k2" = reverse KL | "k3" = forward KL | "k3_is" = reverse KL of stale samples
    # | over the teacher's likeliest tokens: "topk_rev" | "topk_fwd" | "topk_jsd" | over all tokens (small vocabularies
    # only): "full_rev" | "full_fwd" | "full_jsd"
    distill.kind = "gap_nll"  # divergence from the teacher; gap = teacher log-prob - log-prob of the sampled token
    # "sig_gap" = sigmoid(beta * gap) | "const" = 0.5 | "none" = 1 | "hard" = gap > threshold | "centered" = sig_gap -
    # its mean | "outcome" = sigmoid(beta * sign(advantage) * gap) | "standardised" = sig_gap in standard deviations |
    # "sig_entropy" = sigmoid(beta * entropy) | "soft_or" = sigmoid(beta * (1 - (1 - entropy) * (1 - gap)))
    distill.gate = "sig_gap"  # weight of each token; no gradient
    distill.beta = 5.0  # steepness of the gate, per nat (per standard deviation: standardised)
    distill.threshold = 0.0  # hard: the gap above which a token counts, in nats
    distill.coef = 0.01  # weight of the distillation loss
    distill.clip = 0.0  # largest gap (score) or divergence of one entry (topk_*, full_*) that counts, nats; 0 = any
    distill.top_k = 100  # topk_*: how many of the teacher's likeliest tokens
    distill.support = "tail"  # topk_*: all other tokens together are one more entry, "tail" | are left out, "renorm"
    distill.mix = 0.5  # *_jsd: share of the teacher in the mixture; 0 = forward KL, 1 = reverse KL
    # "current" = of the moving weights | "old" = of those that sampled
    distill.gap = "current"  # the student's log-prob in the gap of gates and shapes
    # "old" = the policy before the update | "current" = in every step | "ema" = its moving average | "periodic" = as it
    # was every refresh_every iterations | "frozen_init" = as it was before training
    distill.teacher = "old"  # weights of the teacher
    distill.ema_rate = 0.05  # ema: share of the new policy, once an iteration
    distill.refresh_every = 10  # periodic: iterations between copies
    # all "with_skill" | of them only those of "failed_only" | of "success_only" episodes | "losing_view" = of the half
    # of a group, with or without a skill in the prompt, that won less often, times the difference of success
    distill.rows = "with_skill"  # turns
    distill.span = "all"  # tokens: "all" | of the "action" | of the "thought"
    distill.span_weight = 0.0  # a token of the span weighs so many times another one; 0 = the others do not count
    # "none" = 1 | "second_attempts" = by how much these won more often than first ones, of a group; 0 if they did not
    distill.value = "none"  # weight of a turn by what its skill is worth
    # names with a number that its skill tells and that no earlier command has named: where things lie in this room
    distill.hide_places = False  # tokens that only the skill can know are not distilled
    distill.denominator = "masked"  # mean over the "masked" (distilled) tokens | over "all" response tokens
    # "const" | "linear" = to schedule_end, from iteration start to stop | "window" = only from start to stop |
    # "handoff" = linear over stop - start iterations, from when the gap has stopped shrinking (not before start) |
    # "margin" = the teacher's margin when last measured (eval.teacher_games), as a share of its largest; 0 if none
    distill.schedule = "const"  # course of coef and of adv.shape_weight
    distill.schedule_start = 0  # iteration, counted from 1
    distill.schedule_stop = 100  # iteration
    distill.schedule_end = 0.0  # linear, handoff: the last multiple of coef
    distill.schedule_patience = 10  # handoff: iterations without a new low of the mean gap size
    return distill


def _optim() -> ConfigDict:
    optim = ConfigDict()
    optim.lr = 1e-6  # AdamW learning rate
    optim.b1 = 0.9  # decay of the mean of gradients
    optim.b2 = 0.999  # decay of the mean of squared gradients
    optim.eps = 1e-8  # added to the root of the mean of squared gradients
    optim.weight_decay = 0.01  # decoupled decay, times the learning rate
    optim.grad_clip = 1.0  # largest global norm of a gradient
    optim.warmup_steps = 0  # optimizer steps from zero to the full learning rate
    # A step whose gradient is not finite is skipped and counted, and its batch kept for launch.replay.
    optim.max_skipped = 8  # stop with an error after so many skipped steps in a row; 0 = never
    return optim


def _pack() -> ConfigDict:
    """A row holds several turns side by side; the teacher version of a turn has its place in the same teacher row."""
    pack = ConfigDict()
    pack.row_tokens = 4096  # tokens of a student row
    pack.teacher_row_tokens = 8192  # tokens of a teacher row: the same turns, each with its skill
    pack.max_turns_per_row = 64  # turns in a row
    pack.max_images_per_row = 16  # images in a row, if observations are images; each row has room for as many
    pack.scored_tokens_per_row = 1024  # response tokens in a row (only these reach the vocabulary projection)
    pack.rows_per_micro = 8  # rows in one backward pass; more needs more device memory
    pack.micros_per_mini = 8  # backward passes in one optimizer step
    return pack


def _eval() -> ConfigDict:
    evaluation = ConfigDict()
    evaluation.every = 5  # iterations between evaluations; 0 = only before and after training
    evaluation.split = "seen"  # held-out games: "seen" rooms | "unseen" rooms
    evaluation.games = 0  # games of the panel, each played once per temperature; 0 = the whole split, or 192 generated
    evaluation.temperatures = (0.0, 0.4)  # 0 = greedy
    # The teacher as a player: at every evaluation it plays some of the panel's games again, with the skill that was
    # written about the bare episode and with another task's (teacher/* in metrics).
    evaluation.teacher_games = 48  # games that the teacher plays too, of every family as many; 0 = it is not measured
    evaluation.seed = 1000  # seed of the sampling, the same at every evaluation
    return evaluation


def _checkpoint() -> ConfigDict:
    checkpoint = ConfigDict()
    checkpoint.every = 5  # iterations between checkpoints; the last iteration is always saved
    checkpoint.keep = 3  # newest checkpoints that stay on disk
    checkpoint.dir = ""  # where they are: a directory, or a URL such as gs://bucket/run; "" = in the workdir
    checkpoint.grace_s = 300.0  # seconds from a SIGTERM to the end of the process, saved or not; 0 = no limit
    return checkpoint


def _log() -> ConfigDict:
    log = ConfigDict()
    log.episodes_per_iteration = 128  # episodes of an iteration written to episodes.jsonl
    log.tensorboard = True  # write TensorBoard files beside metrics.jsonl
    log.grad_norms_every = 0  # iterations between separate gradient norms of RL and distillation; 0 = never
    log.diagnostics_episodes = 96  # episodes behind the closing skill table; 0 = no table
    log.profile_iteration = 0  # iteration, counted from 1, that jax.profiler traces into profile/; 0 = none
    # What the trajectory page of launch.report shows: the tokens of a few episodes, each with its log-probs without a
    # skill, with the teacher's and with another task's. It costs three forward passes over these episodes:
    # measured, 4 % of the processor time of the quickstart's iteration, see docs/quickstart.md.
    log.trajectories_every = 5  # iterations between records of training episodes (and the last one); 0 = never
    log.trajectories_per_iteration = 8  # episodes in each: of a group one that won and one that lost, if it has both
    log.trajectories_panel = 6  # games of the panel recorded at every evaluation, always the same; 0 = none
    return log


def _annotate() -> ConfigDict:
    """Stage 1, the data: launch.annotate. What writes for `openai` is named in hindsight.api_*; the prompt's and the
    skill's limits are hindsight.max_analysis_tokens and hindsight.min_words."""
    annotate = ConfigDict()
    annotate.tasks = 180  # training tasks to play, balanced over families
    annotate.rollouts = 8  # episodes of each
    annotate.temperature = 0.4  # sampling temperature of these episodes
    # "openai" = a chat service | "policy" = the model itself | "planner" = rules of the environment, offline
    annotate.writer = "openai"  # who writes the skills
    annotate.max_tokens = 1024  # tokens of an answer
    annotate.asks = 2  # requests about an episode: an answer without a usable skill is sent back with the reason
    annotate.retries = 5  # further attempts at a request that failed in passing
    annotate.usd_per_million_prompt_tokens = 0.0  # price at the service, for the cost in the report
    annotate.usd_per_million_completion_tokens = 0.0  # as above, of what it writes
    annotate.leaks = "keep"  # skills that name an object or place of their game by number: "keep" | "reject"
    annotate.val_fraction = 0.1  # share of every family's tasks whose episodes validate
    annotate.acting = 1.0  # turns of successful episodes for each skill, so that acting is not unlearned; 0 = none
    # turns of successful episodes played with a skill in the prompt (--stage=following), so that skills are followed
    annotate.following = 0.0  # such turns for each skill; 0 = none
    return annotate


def _sft() -> ConfigDict:
    """Stage 1, the training: launch.sft."""
    sft = ConfigDict()
    sft.epochs = 3  # passes over the training rows
    sft.batch = 8  # examples of an optimizer step
    sft.lr = 5e-6  # peak learning rate of AdamW
    sft.warmup = 0.1  # share of the steps from zero to the peak; then half a cosine to zero
    sft.b1 = 0.9  # decay of the mean of gradients
    sft.b2 = 0.95  # decay of the mean of squared gradients
    sft.eps = 1e-8  # added to the root of the mean of squared gradients
    sft.weight_decay = 0.01  # decoupled decay, times the learning rate
    sft.grad_clip = 1.0  # largest global norm of a gradient
    # "example_mean" = over examples, of means over response tokens | "token_mean" = over all response tokens of a step
    sft.loss = "example_mean"  # what is averaged
    sft.row_tokens = 8192  # tokens of a packed row; an example that is longer is an error, nothing is cut
    sft.scored_tokens_per_row = 4096  # response tokens in a row
    sft.rows_per_micro = 0  # rows in one backward pass, a multiple of mesh.fsdp; 0 = mesh.fsdp, one for each
    sft.eval_every = 1  # epochs between validations; before training and at the end there is always one
    sft.play_episodes = 8  # episodes of each validation task at a validation; 0 = none
    sft.play_temperature = 0.4  # sampling temperature of these
    sft.checkpoint_every = 50  # optimizer steps between checkpoints; the end of an epoch is always saved
    return sft

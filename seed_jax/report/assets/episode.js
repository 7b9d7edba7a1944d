"use strict";
// How one episode is unpacked and drawn. The page around it is trajectories.js, which calls this once: index is the
// page's list of episodes, state what is chosen on it (view, color) and pointed at, go what its buttons do there. Every
// text of a model or an environment is written with textContent.
const seedEpisodes = (index, state, go) => {
  const episodes = index.episodes;
  const $ = (id) => document.getElementById(id);
  const LONG = 1500, UNIT = 100;

  const make = (tag, className, content) => {
    const node = document.createElement(tag);
    if (className) node.className = className;
    if (content !== undefined) node.textContent = content;
    return node;
  };
  // Control signs, also those that turn the direction of writing, are shown as their code.
  const CONTROLS = new RegExp("[\\u0000-\\u0008\\u000b-\\u001f\\u007f-\\u009f\\u00ad\\u061c\\u200b\\u200e\\u200f"
    + "\\u2028-\\u202e\\u2060-\\u206f\\ufeff\\ufff9-\\ufffb]", "g");
  const code = (sign) => "\u27e8U+" + sign.codePointAt(0).toString(16).toUpperCase().padStart(4, "0") + "\u27e9";
  const visible = (text) => String(text).replace(CONTROLS, code);
  const signed = (x, digits = 2) => (x < 0 ? "\u2212" : "+") + Math.abs(x).toFixed(digits);

  // -- data ---------------------------------------------------------------------------------------------------------
  const chunks = new Map();
  const loadChunk = (number) => {
    if (!chunks.has(number)) chunks.set(number, (async () => {
      const packed = atob($("chunk" + number).textContent);
      const bytes = Uint8Array.from(packed, (c) => c.charCodeAt(0));
      const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
      return JSON.parse(await new Response(stream).text());
    })());
    return chunks.get(number);
  };
  const load = async (i) => {
    const chunk = await loadChunk(Math.floor(i / index.chunk));
    return { ...episodes[i], ...chunk.episodes[i % index.chunk], words: chunk.words, place: i };
  };

  // -- colours ------------------------------------------------------------------------------------------------------
  const views = { teacher: "t", wrong: "w" };
  const gate = (gap) => {
    if (index.gate === "hard") return gap > index.threshold ? 1 : 0;
    if (index.gate === "none") return 1;
    if (index.gate === "const") return 0.5;
    return 1 / (1 + Math.exp(-index.beta * gap));
  };
  const gapOf = (turn, k) => {
    const gaps = turn[views[state.view]];
    return gaps ? gaps[k] / UNIT : null;
  };
  const tone = (name, alpha) => `rgba(var(--${name}), calc(${alpha.toFixed(3)} * var(--strength)))`;
  const shade = (mode, value) => {
    if (mode === "gap") {
      const alpha = Math.min(1, Math.abs(value) / 2) ** 0.7 * 0.62;
      return alpha < 0.04 ? "" : tone(value > 0 ? "up" : "down", alpha);
    }
    if (mode === "gate") return value < 0.02 ? "" : tone("gate", 0.62 * value);
    return tone("prob", 0.5 * (1 - value));
  };
  const paint = (token, turn, k) => {
    const gap = state.view === "student" ? null : gapOf(turn, k);
    const mode = gap === null ? "prob" : state.color;
    const value = mode === "gap" ? gap : mode === "gate" ? gate(gap) : Math.exp(turn.s[k] / UNIT + (gap ?? 0));
    token.style.backgroundColor = shade(mode, value);
    token.classList.toggle("pos", gap !== null && mode !== "prob" && gap >= 0.1);
    token.classList.toggle("neg", gap !== null && mode !== "prob" && gap <= -0.1);
  };
  const scale = () => {
    const box = $("scale");
    box.replaceChildren();
    const mode = state.view === "student" ? "prob" : state.color;
    const [values, low, high] = {
      gap: [[-2, -1.2, -0.6, -0.25, 0, 0.25, 0.6, 1.2, 2], "rejected \u22122", "+2 nats endorsed"],
      gate: [[0, 0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875, 1], "gate 0", index.gate === "sig_gap" ? "1 (\u00bd: the skill changes nothing)" : "1"],
      prob: [[1, 0.875, 0.75, 0.625, 0.5, 0.375, 0.25, 0.125, 0], "certain", "surprising"],
    }[mode];
    const ramp = make("span", "ramp");
    for (const value of values) {
      const step = make("i");
      step.style.backgroundColor = shade(mode, value);
      ramp.append(step);
    }
    box.append(make("span", "", low), ramp, make("span", "", high));
  };

  // -- one episode --------------------------------------------------------------------------------------------------
  const longText = (className, text) => {
    const box = make("div", className), shown = visible(text);
    if (shown.length <= LONG) { box.textContent = shown; return box; }
    const part = make("span", "", shown.slice(0, LONG) + "\u2026");
    const button = make("button", "more", `show all ${shown.length} characters`);
    button.type = "button";
    button.addEventListener("click", () => { part.textContent = shown; button.remove(); });
    box.append(part, button);
    return box;
  };
  const readout = (turn, k, words) => {
    const parts = [["policy", Math.exp(turn.s[k] / UNIT)]];
    if (turn.t) parts.push(["with the skill", Math.exp((turn.s[k] + turn.t[k]) / UNIT)]);
    if (turn.w) parts.push(["with a wrong skill", Math.exp((turn.s[k] + turn.w[k]) / UNIT)]);
    const line = make("span");
    line.append(make("b", "", visible(words[turn.x[k]]).trim() || "(space)"));
    for (const [name, p] of parts) line.append(make("span", "figure", `${name} ${p.toFixed(3)}`));
    const gap = gapOf(turn, k);
    if (gap !== null && state.view !== "student") {
      line.append(make("span", "figure", `gap ${signed(gap)} nats`), make("span", "figure", `gate ${gate(gap).toFixed(2)}`));
    }
    return line;
  };
  const tokenLine = (turn, words, from, to, say) => {
    const line = make("div", "tokens");
    line.tabIndex = 0;
    line.setAttribute("role", "group");
    const nodes = [];
    for (let k = from; k < to; k++) {
      const word = words[turn.x[k]], lead = /^ +/.exec(word);
      if (lead && k > from) line.append(lead[0]);  // the space before a token is not part of its colour
      const bare = word.replace(/^ +/, "") || (k > from ? "" : word);
      const token = make("span", "tok", visible(bare).replace(/\n/g, "\u21b5\n"));
      if (/^\s*<[^>]*>\s*$/.test(word)) token.classList.add("end");
      paint(token, turn, k);
      token.addEventListener("mouseenter", () => point(k));
      token.addEventListener("click", () => point(k));
      nodes.push(token);
      line.append(token);
    }
    const point = (k) => {
      if (state.at) state.at.classList.remove("at");
      state.at = nodes[k - from];
      state.at.classList.add("at");
      state.pointed = { line, k };
      say(k);
    };
    line.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (!step || !nodes.length) return;
      const now = state.pointed && state.pointed.line === line ? state.pointed.k + step : step > 0 ? from : to - 1;
      point(Math.min(Math.max(now, from), to - 1));
      event.preventDefault();
      event.stopPropagation();
    });
    line.setAttribute("aria-label", "tokens; arrow keys read them one by one");
    return line;
  };
  const outcome = (turn) => {
    const good = turn.c !== null && turn.v && turn.a;
    const why = turn.c === null ? "no action could be read" : !turn.v ? "invalid form" : !turn.a ? "not possible here" : "valid";
    return make("span", good ? "good" : "bad", (good ? "\u2713 " : "\u2717 ") + why);
  };
  // A second attempt is shown as the policy read it: with the skill, so that there is no other view of it.
  const viewOf = (episode) => episode.second ? "student" : state.view;
  const replyName = (view) => `${view === "student" ? "log-prob" : "gap"} of the reply`;
  const replySum = (turn, view) => {
    const values = turn[view === "student" ? "s" : views[view]];
    return values ? values.reduce((a, b) => a + b, 0) / UNIT : null;
  };
  // One cell a turn, coloured by the gap of its whole reply: where in the episode the skill had something to say.
  const stripNode = (episode, turns) => {
    const strip = make("div", "strip"), view = viewOf(episode);
    episode.turns.forEach((turn, number) => {
      const cell = make("button", "", String(number + 1)), gap = replySum(turn, view);
      cell.type = "button";
      cell.style.backgroundColor = gap === null || view === "student" ? "" : shade("gap", gap / 2);
      cell.title = gap === null ? "no skill" : `${replyName(view)} ${signed(gap)} nats`;
      cell.setAttribute("aria-label", `turn ${number + 1}, ${cell.title}`);
      cell.addEventListener("click", () => turns.children[number].scrollIntoView({ block: "center" }));
      strip.append(cell);
    });
    return strip;
  };
  const turnNode = (episode, turn, number) => {
    const node = make("div", "turn"), content = make("div"), view = viewOf(episode);
    node.append(make("div", "n", String(number + 1)), content);
    // The policy saw the picture alone: what it shows as text is for readers, who point at it or cannot see it.
    if (turn.im) content.append(Object.assign(make("img", ""), { src: turn.im, alt: visible(turn.o), title: visible(turn.o) }));
    else content.append(longText("observation", turn.o));
    const out = make("div", "readout");
    out.setAttribute("aria-live", "polite");
    const say = (k) => out.replaceChildren(readout(turn, k, episode.words));
    const total = replySum(turn, view);
    out.textContent = total === null ? "no skill for this turn"
      : `${replyName(view)} ${signed(total)} nats${turn.k ? " (" + visible(turn.k) + ")" : ""}`;
    const n = turn.x.length, cut = [];
    if (turn.th) cut.push(["reasoning", turn.th]);
    if (turn.ac) cut.push(["action", turn.ac]);
    // The tags and whatever else stands between the parts belong to the part before them.
    if (cut.length) {
      const starts = cut.map(([, span]) => Math.max(0, span[0] - 1));
      starts[0] = 0;
      cut.forEach(([name], i) => addPart(name, starts[i], i + 1 < cut.length ? starts[i + 1] : n));
    } else addPart("reply", 0, n);
    function addPart(name, from, to) {
      const part = make("div", "part"), title = make("div", "part-name", name);
      if (to === n) title.append(outcome(turn));
      part.append(title, tokenLine(turn, episode.words, from, to, say));
      content.append(part);
    }
    content.append(out);
    if (turn.sk) content.append(longText("sum", "skill of this turn: " + turn.sk));
    return node;
  };
  const READ = ["The policy reads no skill", "Skill that the policy read"];
  const READ_SECOND = ["The policy reads a skill at single turns only",
    "Skill of the first attempt, which the policy read in the second"];
  const skillNode = (episode) => {
    const view = viewOf(episode), [nothing, what] = episode.second ? READ_SECOND : READ;
    const texts = {
      student: [nothing, episode.given ?? "", what],
      teacher: ["", episode.skill ?? "", index.skill_title],
      wrong: ["", episode.wrong ?? "", "A skill of another task"],
    };
    const [none, text, title] = texts[view];
    const node = make("aside", "skill" + (view === "wrong" ? " wrong" : ""));
    if (text) { node.append(make("h3", "", title), longText("p", text)); return node; }
    node.classList.add("none");
    node.append(make("p", "", none || (view === "wrong" ? "No skill of another task is recorded."
      : "No skill" + (episode.skill_error ? ": " + visible(episode.skill_error) : " for this episode."))));
    return node;
  };
  const when = (e) => e.panel ? (e.iteration ? `after ${e.iteration} iteration${e.iteration > 1 ? "s" : ""}` : "before training") : `iteration ${e.iteration}`;
  const same = (i) => episodes.map((e, j) => j).filter((j) => episodes[j].task === episodes[i].task)
    .sort((a, b) => episodes[a].age - episodes[b].age || a - b);
  // Places of the first and of a second attempt, of which episode i is one; null if they are not both here.
  const attemptsOf = (i) => {
    const second = episodes[i].second ? i : episodes.findIndex((e) => e.second && e.first === i);
    const first = second < 0 ? null : episodes[second].first;
    return first === null ? null : [first, second];
  };
  // between: the skill stands beside it, between a first and a second attempt
  const episodeNode = (episode, other, between) => {
    const node = make("article", "episode"), head = make("header");
    head.append(make("h2", "", visible(episode.goal)));
    const facts = make("p", "facts");
    const attempts = attemptsOf(episode.place);
    const which = episode.second ? ", second attempt" : attempts ? ", first attempt" : "";
    const kind = episode.panel ? "held-out game" : "training episode" + which;
    facts.append(make("span", "badge " + (episode.won ? "won" : "lost"), episode.won ? "\u2713 won" : "\u2717 lost"),
      [visible(episode.family), when(episode), kind, `${episode.turns.length} turns`, visible(episode.task)].join(", "));
    head.append(facts);
    const others = same(episode.place);
    if (others.length > 1) {
      const times = make("div", "times");
      times.append("same game:");
      const named = {};
      for (const j of others) {
        const e = episodes[j], name = `${when(e)}${e.second ? ", second attempt" : ""} ${e.won ? "\u2713" : "\u2717"}`;
        const again = named[name] = (named[name] ?? 0) + 1;
        const button = make("button", "", again > 1 ? `${name} (${again})` : name);
        button.type = "button";
        button.setAttribute("aria-current", String(j === episode.place));
        button.addEventListener("click", () => other ? go.compareWith(j, episode.place) : go.open(j));
        times.append(button);
      }
      if (!other) {
        const button = make("button", "compare", attempts ? "Both attempts side by side" : "Side by side");
        button.type = "button";
        button.addEventListener("click", () => go.toggleCompare());
        times.append(button);
      }
      head.append(times);
    }
    const cols = make("div", "cols"), turns = make("div", "turns");
    episode.turns.forEach((turn, number) => turns.append(turnNode(episode, turn, number)));
    cols.append(turns);
    if (!between || viewOf(episode) === "wrong") cols.append(skillNode(episode));
    head.append(stripNode(episode, turns));
    node.append(head, cols);
    return node;
  };
  return { make, visible, load, views, scale, when, same, attemptsOf, skillNode, episodeNode };
};

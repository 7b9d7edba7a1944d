"use strict";
(() => {
  // Index and chunks come from the page; every text of a model or an environment is written with textContent.
  const index = JSON.parse(document.getElementById("index").textContent);
  const episodes = index.episodes;
  const $ = (id) => document.getElementById(id);
  const state = { shown: [], current: -1, view: "teacher", color: "gap", compare: -1, at: null };
  const LONG = 1500, ROWS = 120, UNIT = 100;

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
  const replySum = (turn) => {
    const values = turn[state.view === "student" ? "s" : views[state.view]];
    return values ? values.reduce((a, b) => a + b, 0) / UNIT : null;
  };
  // One cell a turn, coloured by the gap of its whole reply: where in the episode the skill had something to say.
  const stripNode = (episode, turns) => {
    const strip = make("div", "strip");
    episode.turns.forEach((turn, number) => {
      const cell = make("button", "", String(number + 1)), gap = replySum(turn);
      cell.type = "button";
      cell.style.backgroundColor = gap === null || state.view === "student" ? "" : shade("gap", gap / 2);
      cell.title = gap === null ? "no skill" : `${state.view === "student" ? "log-prob" : "gap"} of the reply ${signed(gap)} nats`;
      cell.setAttribute("aria-label", `turn ${number + 1}, ${cell.title}`);
      cell.addEventListener("click", () => turns.children[number].scrollIntoView({ block: "center" }));
      strip.append(cell);
    });
    return strip;
  };
  const turnNode = (episode, turn, number) => {
    const node = make("div", "turn"), content = make("div");
    node.append(make("div", "n", String(number + 1)), content);
    if (turn.im) content.append(Object.assign(make("img", ""), { src: turn.im, alt: "what the policy saw" }));
    content.append(longText("observation", turn.o));
    const out = make("div", "readout");
    out.setAttribute("aria-live", "polite");
    const say = (k) => out.replaceChildren(readout(turn, k, episode.words));
    const total = replySum(turn);
    out.textContent = total === null ? "no skill for this turn"
      : `${state.view === "student" ? "log-prob" : "gap"} of the reply ${signed(total)} nats${turn.k ? " (" + visible(turn.k) + ")" : ""}`;
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
  const skillNode = (episode) => {
    const texts = {
      student: ["The policy reads no skill", episode.given ? episode.given : "", episode.given ? "Skill that the policy read" : ""],
      teacher: ["", episode.skill ?? "", index.skill_title],
      wrong: ["", episode.wrong ?? "", "A skill of another task"],
    };
    const [none, text, title] = texts[state.view];
    const node = make("aside", "skill" + (state.view === "wrong" ? " wrong" : ""));
    if (text) { node.append(make("h3", "", title), longText("p", text)); return node; }
    node.classList.add("none");
    node.append(make("p", "", none || (state.view === "wrong" ? "No skill of another task is recorded."
      : "No skill" + (episode.skill_error ? ": " + visible(episode.skill_error) : " for this episode."))));
    return node;
  };
  const when = (e) => e.panel ? (e.iteration ? `after ${e.iteration} iteration${e.iteration > 1 ? "s" : ""}` : "before training") : `iteration ${e.iteration}`;
  const same = (i) => episodes.map((e, j) => j).filter((j) => episodes[j].task === episodes[i].task)
    .sort((a, b) => episodes[a].age - episodes[b].age || a - b);
  const episodeNode = (episode, other) => {
    const node = make("article", "episode"), head = make("header");
    head.append(make("h2", "", visible(episode.goal)));
    const facts = make("p", "facts");
    const kind = episode.panel ? "held-out game" : "training episode";
    facts.append(make("span", "badge " + (episode.won ? "won" : "lost"), episode.won ? "\u2713 won" : "\u2717 lost"),
      [visible(episode.family), when(episode), kind, `${episode.turns.length} turns`, visible(episode.task)].join(", "));
    head.append(facts);
    const others = same(episode.place);
    if (others.length > 1) {
      const times = make("div", "times");
      times.append("same game:");
      for (const j of others) {
        const button = make("button", "", `${when(episodes[j])} ${episodes[j].won ? "\u2713" : "\u2717"}`);
        button.type = "button";
        button.setAttribute("aria-current", String(j === episode.place));
        button.addEventListener("click", () => other ? compareWith(j, episode.place) : open(j));
        times.append(button);
      }
      if (!other) {
        const button = make("button", "compare", "Side by side");
        button.type = "button";
        button.addEventListener("click", () => toggleCompare());
        times.append(button);
      }
      head.append(times);
    }
    const cols = make("div", "cols"), turns = make("div", "turns");
    episode.turns.forEach((turn, number) => turns.append(turnNode(episode, turn, number)));
    cols.append(turns, skillNode(episode));
    head.append(stripNode(episode, turns));
    node.append(head, cols);
    return node;
  };

  // -- page ---------------------------------------------------------------------------------------------------------
  let asked = 0;
  const draw = async () => {
    const mine = ++asked, box = $("episodes");
    if (state.current < 0) { box.replaceChildren(make("p", "note", "No episode matches.")); return; }
    const wanted = state.compare >= 0 ? [state.compare, state.current] : [state.current];
    let loaded;
    try { loaded = await Promise.all(wanted.map(load)); } catch (error) {
      box.replaceChildren(make("p", "warning", `This browser cannot unpack the episodes: ${error.message}`));
      return;
    }
    if (mine !== asked) return;
    const has = (key) => loaded.some((e) => e.turns.some((turn) => turn[key]));
    for (const button of $("view").children) {
      button.disabled = button.dataset.view !== "student" && !has(views[button.dataset.view]);
    }
    const chosen = state.view;  // stays chosen while an episode without it is shown as the policy read it
    if (chosen !== "student" && !has(views[chosen])) state.view = "student";
    box.classList.toggle("two", loaded.length > 1);
    box.replaceChildren(...loaded.map((episode) => episodeNode(episode, loaded.length > 1)));
    press();
    scale();
    state.view = chosen;
    document.body.dataset.ready = String(state.current);
  };
  const press = () => {
    const color = state.view === "student" ? "prob" : state.color;
    for (const button of $("view").children) button.setAttribute("aria-pressed", String(button.dataset.view === state.view));
    for (const button of $("color").children) {
      button.setAttribute("aria-pressed", String(button.dataset.color === color));
      button.disabled = state.view === "student";
    }
  };
  const open = (i, keepCompare = false) => {
    state.current = i;
    if (!keepCompare) state.compare = -1;
    for (const row of $("list").children) row.setAttribute("aria-current", String(Number(row.dataset.i) === i));
    try { history.replaceState(null, "", "#" + i); } catch { /* some browsers refuse this for files */ }
    return draw();
  };
  const compareWith = (i, side) => {
    if (side === state.compare) state.compare = i; else state.current = i;
    if (state.compare === state.current) state.compare = -1;
    draw();
  };
  const toggleCompare = () => {
    const others = same(state.current).filter((j) => j !== state.current);
    if (state.compare >= 0) state.compare = -1;
    else if (others.length) {
      const all = same(state.current);
      state.compare = all[0] === state.current ? state.current : all[0];
      if (all[0] === state.current) state.current = all[all.length - 1];
    }
    draw();
  };

  const rowNode = (i) => {
    const e = episodes[i], row = make("button", "row");
    row.type = "button";
    row.dataset.i = i;
    row.append(make("span", e.won ? "won" : "lost", e.won ? "\u2713" : "\u2717"), make("span", "goal", visible(e.goal)),
      make("span", "meta", `${when(e)}${e.panel ? ", held-out" : ""}, ${e.count} turns, ${visible(e.family)}`));
    row.setAttribute("aria-current", String(i === state.current));
    return row;
  };
  const fill = () => {
    const list = $("list");
    list.replaceChildren(...state.shown.slice(0, ROWS).map(rowNode));
    list.scrollTop = 0;
    $("count").textContent = `${state.shown.length} of ${episodes.length} episodes`;
  };
  $("list").addEventListener("scroll", () => {  // rows come as they are needed
    const list = $("list");
    if (list.scrollTop + list.clientHeight < list.scrollHeight - 200) return;
    const have = list.children.length;
    list.append(...state.shown.slice(have, have + ROWS).map(rowNode));
  });
  $("list").addEventListener("click", (event) => {
    const row = event.target.closest(".row");
    if (row) open(Number(row.dataset.i));
  });

  const texts = new Map();
  const textOf = async (i) => {
    if (!texts.has(i)) {
      const e = await load(i);
      const reply = (turn) => turn.x.map((x) => e.words[x]).join("");
      const turns = e.turns.map((turn) => `${turn.o} ${reply(turn)} ${turn.c ?? ""}`);
      texts.set(i, [e.goal, e.task, e.family, e.skill ?? "", e.wrong ?? "", ...turns].join("\n").toLowerCase());
    }
    return texts.get(i);
  };
  let searching = 0;
  const filter = async () => {
    const mine = ++searching, query = $("search").value.trim().toLowerCase();
    const [family, outcome, iteration, source] = ["family", "outcome", "iteration", "source"].map((name) => $(name).value);
    const fits = (e) => (!family || e.family === family) && (!outcome || e.won === (outcome === "won"))
      && (!iteration || String(e.iteration) === iteration) && (!source || e.panel === (source === "panel"));
    let found = episodes.map((e, i) => i).filter((i) => fits(episodes[i]));
    if (query) {
      $("count").textContent = "searching\u2026";
      const hits = [];
      for (const i of found) {
        if ((await textOf(i)).includes(query)) hits.push(i);
        if (mine !== searching) return;
      }
      found = hits;
    }
    state.shown = found;
    fill();
    if (!found.includes(state.current)) await open(found.length ? found[0] : -1); else await draw();
  };
  for (const name of ["family", "outcome", "iteration", "source"]) $(name).addEventListener("change", filter);
  let delay = 0;
  $("search").addEventListener("input", () => { clearTimeout(delay); delay = setTimeout(filter, 180); });

  const setView = (view) => { state.view = view; draw(); };
  const setColor = (color) => { state.color = color; draw(); };
  const onPress = (id, act) => $(id).addEventListener("click", (event) => {
    const button = event.target.closest("button");
    if (button && !button.disabled) act(button.dataset[id]);
  });
  onPress("view", setView);
  onPress("color", setColor);
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (/^(INPUT|SELECT)$/.test(event.target.tagName)) {
      if (event.key === "Escape") event.target.blur();
      return;
    }
    const step = { j: 1, k: -1 }[event.key];
    const view = { 1: "student", 2: "teacher", 3: "wrong" }[event.key];
    if (step) {
      const place = state.shown.indexOf(state.current) + step;
      if (state.shown[place] !== undefined) {
        open(state.shown[place]);
        const row = [...$("list").children].find((node) => Number(node.dataset.i) === state.current);
        if (row) row.scrollIntoView({ block: "nearest" });
      }
    } else if (view) {
      if (![...$("view").children].find((button) => button.dataset.view === view).disabled) setView(view);
    } else if (event.key === "g") setColor({ gap: "gate", gate: "prob", prob: "gap" }[state.color]);
    else if (event.key === "c") toggleCompare();
    else if (event.key === "/") { $("search").focus(); event.preventDefault(); }
  });

  const options = (id, values, show) => values.forEach((value) => {
    const option = make("option", "", show(value));
    option.value = value;
    $(id).append(option);
  });
  options("family", [...new Set(episodes.map((e) => e.family))].sort(), visible);
  const iterations = [...new Set(episodes.map((e) => e.iteration))].sort((a, b) => a - b);
  options("iteration", iterations, (i) => i ? `iteration ${i}` : "before training");
  const first = Number(location.hash.slice(1));
  state.current = location.hash.length > 1 && episodes[first] ? first : episodes.length ? index.first : -1;
  filter();
})();

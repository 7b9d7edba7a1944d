"use strict";
(() => {
  // The list of episodes, its filters and keys; index and chunks come from the page.
  const index = JSON.parse(document.getElementById("index").textContent);
  const episodes = index.episodes;
  const $ = (id) => document.getElementById(id);
  const state = { shown: [], current: -1, view: "teacher", color: "gap", compare: -1, at: null };
  const go = {};
  const drawn = seedEpisodes(index, state, go);
  const { make, visible, load, views, scale, when, same, attemptsOf, skillNode, episodeNode } = drawn;
  const ROWS = 120;

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
    const last = loaded[loaded.length - 1], between = loaded.length > 1 && last.second && last.first === state.compare;
    box.classList.toggle("two", loaded.length > 1);
    box.classList.toggle("attempts", between);
    const nodes = loaded.map((episode) => episodeNode(episode, loaded.length > 1, between));
    if (between) nodes.splice(1, 0, skillNode(last));
    box.replaceChildren(...nodes);
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
  // Scrolls the list, and nothing but the list, to the episode that is open.
  const reveal = () => {
    const list = $("list"), place = state.shown.indexOf(state.current);
    if (place >= list.children.length) extend(place + 1);
    const row = list.children[place];
    if (!row) return;
    const seen = list.getBoundingClientRect(), here = row.getBoundingClientRect();
    list.scrollTop += Math.min(0, here.top - seen.top) + Math.max(0, here.bottom - seen.bottom);
  };
  const open = (i) => {
    state.current = i;
    state.compare = -1;
    for (const row of $("list").children) row.setAttribute("aria-current", String(Number(row.dataset.i) === i));
    reveal();
    try { history.replaceState(null, "", "#" + i); } catch { /* some browsers refuse this for files */ }
    return draw();
  };
  const compareWith = (i, side) => {
    if (side === state.compare) state.compare = i; else state.current = i;
    if (state.compare === state.current) state.compare = -1;
    draw();
  };
  const toggleCompare = () => {
    const others = same(state.current).filter((j) => j !== state.current), attempts = attemptsOf(state.current);
    if (state.compare >= 0) state.compare = -1;
    else if (attempts) [state.compare, state.current] = attempts;
    else if (others.length) {
      const all = same(state.current);
      state.compare = all[0] === state.current ? state.current : all[0];
      if (all[0] === state.current) state.current = all[all.length - 1];
    }
    draw();
  };

  Object.assign(go, { open, compareWith, toggleCompare });

  const rowNode = (i) => {
    const e = episodes[i], row = make("button", "row");
    row.type = "button";
    row.dataset.i = i;
    const kind = e.panel ? ", held-out" : e.second ? ", second attempt" : "";
    row.append(make("span", e.won ? "won" : "lost", e.won ? "\u2713" : "\u2717"), make("span", "goal", visible(e.goal)),
      make("span", "meta", `${when(e)}${kind}, ${e.count} turns, ${visible(e.family)}`));
    row.setAttribute("aria-current", String(i === state.current));
    return row;
  };
  const extend = (count) => {
    const list = $("list");
    list.append(...state.shown.slice(list.children.length, count).map(rowNode));
  };
  const fill = () => {
    const list = $("list");
    list.replaceChildren();
    extend(ROWS);
    list.scrollTop = 0;
    $("count").textContent = `${state.shown.length} of ${episodes.length} episodes`;  // which takes room from the list
    reveal();
  };
  $("list").addEventListener("scroll", () => {  // rows come as they are needed
    const list = $("list");
    if (list.scrollTop + list.clientHeight < list.scrollHeight - 200) return;
    extend(list.children.length + ROWS);
  });
  $("list").addEventListener("click", (event) => {
    const row = event.target.closest(".row"), box = $("episodes");
    if (!row) return;
    open(Number(row.dataset.i));
    if (box.getBoundingClientRect().top > innerHeight / 2) box.scrollIntoView();  // on a phone it is below the list
  });

  const texts = new Map();
  const textOf = async (i) => {
    if (!texts.has(i)) {
      const e = await load(i);
      const reply = (turn) => turn.x.map((x) => e.words[x]).join("");
      const turns = e.turns.map((turn) => `${turn.o} ${reply(turn)} ${turn.c ?? ""}`);
      const skills = [e.skill ?? "", e.wrong ?? "", e.given ?? ""];
      texts.set(i, [e.goal, e.task, e.family, ...skills, ...turns].join("\n").toLowerCase());
    }
    return texts.get(i);
  };
  let searching = 0;
  const filter = async () => {
    const mine = ++searching, query = $("search").value.trim().toLowerCase();
    const [family, outcome, iteration, source] = ["family", "outcome", "iteration", "source"].map((name) => $(name).value);
    const fits = (e) => (!family || e.family === family) && (!outcome || e.won === (outcome === "won"))
      && (!iteration || String(e.iteration) === iteration)
      && (!source || (source === "second" ? e.second : e.panel === (source === "panel")));
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
      if (state.shown[place] !== undefined) open(state.shown[place]);
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
  if (episodes.some((e) => e.second)) options("source", ["second"], () => "second attempts");
  const iterations = [...new Set(episodes.map((e) => e.iteration))].sort((a, b) => a - b);
  options("iteration", iterations, (i) => i ? `iteration ${i}` : "before training");
  const first = Number(location.hash.slice(1));
  state.current = location.hash.length > 1 && episodes[first] ? first : episodes.length ? index.first : -1;
  filter();
})();

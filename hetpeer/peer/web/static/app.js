// The page: listens to the daemon's views and shows each; its buttons ask the daemon.

import { Chart } from "./charts.js";
import { byId } from "./dom.js";
import * as panels from "./panels.js";
import { clock } from "./units.js";

const loss = new Chart(byId("loss"), [["training", "--one"], ["evaluation", "--two"]]);
const speed = new Chart(byId("speed"), [["speed", "--one"]], { time: true });
const AGAIN_MS = 3000;
const SILENT_S = 5;
const OWN = new Set([panels.header, panels.warnings, panels.yours, panels.machine, panels.gpu, panels.limits]);
const QUESTIONS = { finish: "Leave the run when the current step is done? The daemon then ends; start it again with hetpeer join, or as a service." };
const token = new URLSearchParams(location.hash.slice(1)).get("token") ?? "";

function show(view) {
  for (const panel of Object.values(panels)) if (view.status || OWN.has(panel)) panel(view);
  picture(view.map);
  loss.show([view.curves.training, view.curves.evaluation]);
  speed.show([view.curves.speed]);
  byId("buttons").hidden = !view.you;
  for (const order of ["pause", "resume", "finish"]) byId(order).disabled = !view.you?.may.includes(order);
}

/** The map of the swarm, asked for when it has changed; its words are there for those who do not see it. */
function picture(drawn) {
  byId("picture-panel").hidden = !drawn;
  if (!drawn) return;
  byId("picture-words").textContent = drawn.words;
  const source = `api/v1/map.svg?${new URLSearchParams({ drawn: drawn.drawn, token })}`;
  if (byId("picture").getAttribute("src") === source) return;
  byId("picture").alt = `Map of the swarm. ${drawn.words}`;
  byId("picture").src = source;
}

/** The notice while the swarm does not answer: only the daemon's and the machine's panels are current then. */
function silence({ status, time, silent_since: since }) {
  if (since === null || time - since < SILENT_S) return "";
  return `the swarm has not answered since ${clock(since)}${status ? "; its figures are from then" : ""}`;
}

function notice(text) {
  byId("notice").textContent = text;
  byId("notice").hidden = !text;
}

async function order(what) {
  const answer = await fetch(`api/v1/${what}`, { method: "POST", headers: { Authorization: `Bearer ${token}` } });
  if (!answer.ok) notice(`${what}: ${(await answer.json()).error}`);
}

for (const what of ["pause", "resume", "finish"]) {
  byId(what).addEventListener("click", () => {
    if (what in QUESTIONS && !confirm(QUESTIONS[what])) return;
    order(what).catch(() => notice(`${what}: the daemon does not answer`));
  });
}

const events = `api/v1/events?${new URLSearchParams({ token })}`;

/** Show each view as it comes. The browser reconnects a broken stream; a refused one we ask again, and show the reason. */
function listen() {
  const stream = new EventSource(events);
  stream.addEventListener("view", (event) => {
    const view = JSON.parse(event.data);
    show(view);
    notice(silence(view));
  });
  stream.addEventListener("error", () => {
    notice("the daemon does not answer; these are its last figures");
    if (stream.readyState !== EventSource.CLOSED) return;
    setTimeout(listen, AGAIN_MS);
    refusal().then((why) => why && notice(why)).catch(() => {});
  });
}

/** The daemon's reason for a refusal; empty if it answers by now. */
async function refusal() {
  const answer = await fetch(events, { method: "GET", headers: { Accept: "application/json" } });
  if (!answer.ok) return (await answer.json()).error;
  await answer.body.cancel();
  return "";
}

listen();

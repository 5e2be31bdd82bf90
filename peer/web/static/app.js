// The page: listens to the daemon's views and shows each; its buttons ask the daemon.

import { Chart } from "./charts.js";
import { byId } from "./dom.js";
import * as panels from "./panels.js";

const loss = new Chart(byId("loss"), [["training", "--one"], ["evaluation", "--two"]]);
const speed = new Chart(byId("speed"), [["speed", "--one"]], { time: true });
const AGAIN_MS = 3000;
const token = new URLSearchParams(location.hash.slice(1)).get("token") ?? "";

function show(view) {
  for (const panel of Object.values(panels)) panel(view);
  loss.show([view.curves.training, view.curves.evaluation]);
  speed.show([view.curves.speed]);
  byId("buttons").hidden = !view.you;
  for (const order of ["pause", "resume", "finish"]) byId(order).disabled = !view.you?.may.includes(order);
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
  byId(what).addEventListener("click", () => order(what).catch(() => notice(`${what}: the daemon does not answer`)));
}

const events = `api/v1/events?${new URLSearchParams({ token })}`;

/** Each view as it comes. A stream that breaks is connected again by the browser; one that was refused, by us, after saying why. */
function listen() {
  const stream = new EventSource(events);
  stream.addEventListener("view", (event) => {
    show(JSON.parse(event.data));
    notice("");
  });
  stream.addEventListener("error", () => {
    notice("the daemon does not answer; what is shown is from before");
    if (stream.readyState !== EventSource.CLOSED) return;
    setTimeout(listen, AGAIN_MS);
    refusal().then((why) => why && notice(why)).catch(() => {});
  });
}

/** What the daemon says to who may not look; nothing if he may by now. */
async function refusal() {
  const answer = await fetch(events, { method: "GET", headers: { Accept: "application/json" } });
  if (!answer.ok) return (await answer.json()).error;
  await answer.body.cancel();
  return "";
}

listen();

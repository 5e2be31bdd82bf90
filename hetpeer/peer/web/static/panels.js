// Panels of the page, each filled from a view (peer/web/page_view.py). While nothing is known of the swarm there is no status, and only the
// panels in OWN are filled.

import { byId, element, facts, rows } from "./dom.js";
import { bytes, clock, duration, rate, share, whole } from "./units.js";

const short = (peer) => `…${peer.slice(-6)}`;
const called = (row) => row.name || short(row.peer);
const range = ([begin, end]) => (end - begin === 1 ? `${begin}` : `${begin}–${end - 1}`);
const blocks = (place) => `block${place[1] - place[0] === 1 ? "" : "s"} ${range(place)}`;
const NAMED = 5; // in one line
const TONES = { training: "good", reducing: "good", applying: "good", finished: "good", failed: "bad", stopped: "bad" };

export function header({ status, you }) {
  const { state, reason } = you ?? status ?? { state: "connecting", reason: "" };
  byId("state").textContent = reason ? `${state}: ${reason}` : state;
  byId("state").className = `state ${TONES[state] ?? "warn"}`;
  if (!status) return;
  byId("run").textContent = status.run.name;
  document.title = `${state} · ${status.run.name} · hetpeer`;
}

export function yours({ status, you, time }) {
  byId("you-panel").hidden = !you;
  if (!you) return;
  const row = status?.peers.find(({ peer }) => peer === you.peer);
  const mine = status?.credit?.yours;
  facts(byId("you"), [
    ["id", short(you.peer)],
    ["why", you.why],
    ["in this state for", duration(Math.max(time - you.since, 0))],
    ["blocks", row?.blocks ? range(row.blocks) : ""],
    ["speed", you.tokens_per_second && status ? `${whole(you.tokens_per_second)} ${status.run.unit}/s` : ""],
    ["microbatches done", whole(you.microbatches)],
    ["credit", mine ? `${whole(mine.credit)} (rank ${mine.rank} of ${status.credit.contributors})` : ""],
    ["busy", row ? busy(row) : ""],
    ["line", row ? line(row) : ""],
    ["steady", row ? steady(row) : ""],
    ["reached by others", row ? reached(row, status.peers) : ""],
  ]);
}

/** The GPU in use; before one is in use, all that may be. */
export function gpu({ you }) {
  byId("gpu-panel").hidden = !you?.gpus.length;
  if (!you) return;
  const offered = you.limits.on_gpu && you.gpus.length === 1 ? you.limits.offered : null;
  facts(byId("gpu"), you.gpus.flatMap(({ load, celsius, watts }) => [
    ["card", load.name],
    ["busy", share(load.busy)],
    ["memory used", `${bytes(load.memory_used)} of ${bytes(load.memory_total)}`],
    ["memory offered", offered === null ? "" : bytes(offered)],
    ["temperature", celsius === null ? "" : `${Math.round(celsius)} °C`],
    ["power", watts === null ? "" : `${Math.round(watts)} W`],
  ]));
}

/** Limits on what hetpeer may use; a value that is not a default is shown with its source. */
export function limits({ you }) {
  byId("limits-panel").hidden = !you;
  if (!you) return;
  const { settings, month_bytes: month, offered, main_memory: beside, program, offload, on_gpu: onGpu } = you.limits;
  const told = (key, say = (value) => value) => {
    const { value, source } = settings[key];
    return source === "default" ? say(value) : `${say(value)} (${source})`;
  };
  const unless = (none, say) => (value) => (value === none ? "no limit" : say(value));
  const memory = offered === null ? "" : `; offers ${bytes(offered)}`;
  const own = program === null ? "" : `; the program itself takes ${bytes(program)}`;
  const mode = settings["when.mode"].value;
  facts(byId("limits"), [
    ["held back by", you.state === "paused" ? you.reason.replaceAll(",", ", ") : ""],
    ["upload", told("limits.up")],
    ["download", told("limits.down")],
    ["this month", `${bytes(month)} of ${told("limits.transfer_cap", unless("none", (value) => value))}`],
    ["processor", told("limits.cpu", unless("0", (value) => `${value} cores`))],
    ["memory", told("limits.ram") + own + (onGpu ? `; offers ${bytes(beside)}` : memory)],
    ["GPU memory", onGpu ? told("limits.gpu_memory") + memory : ""],
    ["disk", told("limits.disk")],
    ["offload", told("compute.offload") + (offload && `; ${offload}`)],
    ["computes when", told("when.mode")],
    ["at these hours", mode === "schedule" ? told("when.hours") : ""],
    ["idle after", mode === "idle" ? told("when.idle_after") : ""],
    ["on battery", told("when.on_battery", (value) => (value === "run" ? "goes on" : "pauses"))],
    ["GPU temperature at most", told("limits.temperature_c", unless("0", (value) => `${value} °C`))],
    ["processor temperature at most", told("limits.cpu_temperature_c", unless("0", (value) => `${value} °C`))],
    ["GPU power at most", told("limits.gpu_power_w", unless("0", (value) => `${value} W`))],
  ]);
}

/** Problems of the daemon and its machine. */
export function warnings({ warnings: all }) {
  byId("warnings-panel").hidden = !all.length;
  byId("warnings").replaceChildren(...all.map(({ code, what, why, fix }) =>
    element("li", "", "", [element("b", code), ` ${what}: ${why}. `, element("span", `What to do: ${fix}`, "fix")])));
}

export function progress({ status }) {
  const { progress: at, swarm, run } = status;
  const unchecked = status.peers.filter(({ peer }) => status.unchecked.includes(peer)).map(called);
  const more = unchecked.length > NAMED ? ` and ${unchecked.length - NAMED} more` : "";
  byId("bar").value = at.steps ? at.step / at.steps : 0;
  facts(byId("progress"), [
    ["state", status.reason ? `${status.state}: ${status.reason}` : status.state],
    ["step", `${whole(at.step)} of ${whole(at.steps)}`],
    ["loss", at.loss === null ? "" : at.loss.toFixed(4)],
    ["speed", swarm.tokens_per_second ? `${whole(swarm.tokens_per_second)} ${run.unit}/s` : ""],
    ["time left", at.eta_s === null ? "" : duration(at.eta_s)],
    ["volunteers", `${swarm.volunteers}, ${swarm.working} at work`],
    ["coordinator", coordinator(status)],
    ["weakest", weakest(swarm)],
    ["not spot-checked", unchecked.slice(0, NAMED).join(", ") + more],
  ]);
}

function coordinator({ peers: all, swarm }) {
  const leader = swarm.coordinator && all.find(({ role }) => role === "coordinator");
  return leader ? called(leader) : "none";
}

/** `block 0 has one holder only`: what is lost first when volunteers leave. */
function weakest({ weakest_block: block, weakest_holders: holders }) {
  return `block ${block} has ${["no holder", "one holder only"][holders] ?? `${holders} holders`}`;
}

export function map({ status, you }) {
  const names = new Map(status.peers.map((row) => [row.peer, called(row)]));
  byId("map").replaceChildren(...status.blocks.map(({ block, holders }) => {
    const marks = holders.map((peer) => {
      const mark = element("i", "", peer === you?.peer ? "you" : "");
      mark.title = names.get(peer) ?? short(peer);
      return mark;
    });
    return element("div", "", "", [element("span", String(block)), ...(marks.length ? marks : [element("i", "", "nobody")])]);
  }));
}

export function machine({ machine: found }) {
  byId("machine-panel").hidden = !found;
  if (!found) return;
  facts(byId("machine"), [
    ["processor", `${share(found.cpu)} busy; hetpeer uses ${found.own_cores.toFixed(2)} cores`],
    ["memory", `${bytes(found.memory_used)} of ${bytes(found.memory_total)} used; hetpeer uses ${bytes(found.own_memory)}`],
    ["disk free", bytes(found.disk_free)],
  ]);
}

export function credit({ status }) {
  byId("credit-panel").hidden = !status.credit?.first.length;
  if (!status.credit) return;
  byId("credit").replaceChildren(...status.credit.first.slice(0, 10).map((row) => element("li", `${called(row)}: ${whole(row.credit)}`)));
}

export function peers({ status, you }) {
  rows(byId("peers"), status.peers.map((row) => ({
    className: row.peer === you?.peer ? "you" : "",
    cells: [
      row.name ? `${row.name} ${short(row.peer)}` : short(row.peer),
      row.role,
      row.state,
      place(row),
      whole(row.step),
      row.tokens_per_second ? `${whole(row.tokens_per_second)} ${status.run.unit}/s` : "",
      busy(row),
      row.device,
      memory(row),
      line(row),
      steady(row),
      reached(row, status.peers),
    ],
  })));
}

/** The plan that was given to the run, beside what came of it. */
export function plan({ status }) {
  const { plan: given } = status;
  byId("plan-panel").hidden = !given;
  if (!given) return;
  const seated = given.seats.filter(({ standing }) => standing === "as planned").length;
  const when = given.ended === null ? `in force since step ${whole(given.since)}` : `not in force since step ${whole(given.ended)}`;
  const planned = given.planned_s === null ? "" : `; a step is planned to take ${given.planned_s.toFixed(2)} s${given.cost === "dt-fm" ? " (communication only)" : ""}`;
  const measured = given.measured_s === null ? "" : `; measured: ${given.measured_s.toFixed(2)} s`;
  byId("plan-summary").textContent = `Plan ${given.id} is ${when}; ${seated} of ${given.seats.length} are at their places${planned}${measured}.`;
  rows(byId("plan"), given.seats.map((seat) => ({
    className: seat.standing === "as planned" ? "" : "unlike",
    cells: [
      seat.peer ? `${seat.device} ${short(seat.peer)}` : seat.device,
      `pipeline ${seat.pipeline}, ${blocks(seat.planned)}`,
      seat.standing === "elsewhere" ? `has ${blocks(seat.blocks)}` : seat.standing,
    ],
  })));
}

export function links({ status }) {
  const names = endings(status.peers);
  rows(byId("links"), status.peers.flatMap((row) => row.links.map((link) => ({
    cells: [
      called(row),
      names.get(link.to) ?? short(link.to),
      link.bytes_per_second ? rate(link.bytes_per_second) : "",
      link.trip_s ? `${(1e3 * link.trip_s).toFixed(0)} ms` : "",
      link.ratio > 1 ? `${link.ratio.toFixed(1)}×` : "",
      link.why,
      link.saved_bytes ? bytes(link.saved_bytes) : "",
      way(link.path, names),
    ],
  }))));
}

/** How a link reaches the other peer: `direct`, `punched`, or `through ada`. */
function way(path, names) {
  const relay = path.startsWith("through ") ? path.slice("through ".length) : "";
  return relay ? `through ${names.get(relay) ?? short(relay)}` : path;
}

export function leftovers({ status }) {
  const names = new Map(status.peers.map((row) => [row.peer, called(row)]));
  const told = status.leftovers.map((row) =>
    element("li", `${row.microbatches} microbatch${row.microbatches === 1 ? "" : "es"} of step ${row.step} need a holder of block ${row.block}; kept by ${names.get(row.sender) ?? short(row.sender)}`));
  byId("leftovers").replaceChildren(...(told.length ? told : [element("li", "none", "empty")]));
}

export function events({ events: all }) {
  const told = all.toReversed().map((event) =>
    element("li", "", event.grave ? "grave" : "", [element("time", clock(event.time)), event.text]));
  byId("events").replaceChildren(...(told.length ? told : [element("li", "nothing has happened since this page was opened", "empty")]));
}

/** Share of the time that a worker computes, and what it mostly waits for: `61%, 30% waiting for data`. */
function busy(row) {
  if (!row.computes) return "";
  const rest = Math.max(1 - row.computes - row.waits_data - row.waits_room, 0);
  const [waits, what] = [[row.waits_data, "data"], [row.waits_room, "memory"], [rest, "the next step"]].sort((a, b) => b[0] - a[0])[0];
  return share(row.computes) + (waits >= 0.05 ? `, ${share(waits)} waiting for ${what}` : "");
}

/** `0–4`, and whether it holds them, is a backup there, or is not ready yet. */
function place(row) {
  if (!row.blocks) return "";
  if (row.role !== "volunteer") return range(row.blocks);
  return `${range(row.blocks)}, ${row.holds ? "holder" : row.state === "backup" ? "backup" : "not ready"}`;
}

/** Memory that a peer offers; empty while it is unknown. */
function memory({ gpu_bytes: gpu, ram_bytes: ram }) {
  return [[gpu, "GPU"], [ram, "RAM"]].filter(([size]) => size).map(([size, kind]) => `${bytes(size)} ${kind}`).join(", ");
}

/** Uplink and downlink of a peer; empty while they are unknown. */
function line({ uplink, downlink }) {
  return [[uplink, "up"], [downlink, "down"]].filter(([speed]) => speed).map(([speed, way]) => `${rate(speed)} ${way}`).join(", ");
}

/** Time that a peer has been there, and how often it has left the run. */
function steady({ role, up_s: up, departures }) {
  const left = { 0: "never left", 1: "left once" }[departures] ?? `left ${departures} times`;
  return [up ? `here ${duration(up)}` : "", role === "volunteer" && departures !== null ? left : ""].filter(Boolean).join(", ");
}

function reached(row, all) {
  if (row.reach === "public") return "directly";
  if (row.reach !== "private") return "";
  const names = endings(all);
  return row.relays.length ? `through ${row.relays.map((relay) => names.get(relay) ?? short(relay)).join(", ")}` : "by nobody";
}

/** Last eight characters of each peer's id, as in adverts, to its name. */
const endings = (all) => new Map(all.map((row) => [row.peer.slice(-8), called(row)]));

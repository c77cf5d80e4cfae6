/**
 * Which run asks: what OpenClaw's hooks tell of each run, found again when the run's requests are
 * made. Pure: no I/O, no clock.
 */

const LIMIT = 1024; // runs and sessions remembered; the oldest go first

/** Runs that OpenClaw starts as the user's although no user said anything. */
const GREETING = /^A new session was started via \/new or \/reset/m;

export class Runs {
  #byRun = new Map();
  #bySession = new Map();
  #sessionOfKey = new Map();

  /** A run begins. `context` is that of the hook `before_prompt_build`; `newId` names a run that
   * this version of OpenClaw gives plugins no name for. */
  begin(context, prompt, newId) {
    const { sessionId, sessionKey, trigger } = context;
    if (!sessionId) return;
    const run = {
      sessionId,
      runId: context.runId ?? newId(),
      turnType: trigger === "user" && !isHousekeeping(sessionKey, prompt) ? "main" : "side",
    };
    remember(this.#byRun, run.runId, run);
    remember(this.#bySession, sessionId, run);
    if (sessionKey) remember(this.#sessionOfKey, sessionKey, sessionId);
  }

  /** The run that makes a request, or undefined. A request that names its run (`RUN:model:N`) is
   * never taken for another run of its session: so a compaction within a run is not the run's. */
  find({ requestId, sessionId } = {}) {
    if (requestId) return this.#byRun.get(requestId.replace(/:model:\d+$/, ""));
    return this.#bySession.get(sessionId);
  }

  /** The session that was last seen under a key. */
  sessionOf(sessionKey) {
    return this.#sessionOfKey.get(sessionKey);
  }

  /** The session is over. */
  end(sessionId) {
    this.#bySession.delete(sessionId);
    for (const [key, id] of this.#sessionOfKey) {
      if (id === sessionId) this.#sessionOfKey.delete(key);
    }
    for (const [runId, run] of this.#byRun) {
      if (run.sessionId === sessionId) this.#byRun.delete(runId);
    }
  }
}

/** What is known to be a turn of the agent says so; everything else is a side request. */
export function runHeaders(run) {
  return {
    "x-session-id": run.sessionId,
    "x-run-id": run.runId,
    "x-turn-type": run.turnType,
  };
}

/** A request that no run makes: /btw, compaction, other small jobs. */
export function sideHeaders(sessionId) {
  return { ...(sessionId ? { "x-session-id": sessionId } : {}), "x-turn-type": "side" };
}

function isHousekeeping(sessionKey, prompt) {
  return Boolean(sessionKey?.startsWith("temp:")) || GREETING.test(prompt ?? "");
}

function remember(map, key, value) {
  map.delete(key);
  map.set(key, value);
  if (map.size > LIMIT) map.delete(map.keys().next().value);
}

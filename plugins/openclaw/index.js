/**
 * Gateway plugin for stock OpenClaw. It owns the provider id `openclaw-rl`, so OpenClaw asks it
 * (and only for requests to this provider) how a request is made; it adds the names of session,
 * run and turn type as headers, and tells the openclaw-rl gateway when a session ends.
 */

import { randomUUID } from "node:crypto";

import { Runs, runHeaders, sideHeaders } from "./runs.js";

export const PROVIDER = "openclaw-rl";

/** Ends after which nothing of the session comes back. Not: compaction, shutdown, restart.
 * 2026.3.23 gives no reason; there the hook means a reset. */
const FINAL = new Set([undefined, "new", "reset", "idle", "daily", "deleted"]);

// OpenClaw registers plugins several times, and hooks and provider may come from different ones.
const runs = (globalThis[Symbol.for("openclaw-rl.runs")] ??= new Runs());

export default {
  id: "openclaw-rl",
  name: "openclaw-rl",
  description: "Names session, run and turn type to the openclaw-rl gateway",

  register(api) {
    api.on("before_prompt_build", (event, context) => {
      runs.begin(context ?? {}, event?.prompt, randomUUID);
    });
    api.on("session_end", (event) => {
      if (FINAL.has(event?.reason)) return end(api, event.sessionId);
    });
    // A reset or delete by the gateway's own methods: 2026.3.23 has no other word for it.
    api.on("subagent_ended", (event) => {
      if (event?.outcome === "reset" || event?.outcome === "deleted") {
        return end(api, runs.sessionOf(event.targetSessionKey));
      }
    });
    api.registerProvider({
      id: PROVIDER,
      label: "openclaw-rl",
      auth: [],
      wrapStreamFn(context) {
        const inner = context.streamFn;
        if (!inner) return undefined;
        return (model, conversation, options) => {
          const run = runs.find(options);
          const headers = run ? runHeaders(run) : sideHeaders(options?.sessionId);
          return inner(model, conversation, {
            ...options,
            headers: { ...options?.headers, ...headers },
          });
        };
      },
      // Newer versions ask this for every request; what `wrapStreamFn` says of a run's wins.
      resolveTransportTurnState: ({ sessionId }) => ({ headers: sideHeaders(sessionId) }),
    });
  },
};

/** Tell the gateway that nothing follows in the session. A failure costs only time: turns that
 * wait for a next state give up by themselves. */
async function end(api, sessionId) {
  if (!sessionId) return;
  runs.end(sessionId);
  const { baseUrl, apiKey } = api.config?.models?.providers?.[PROVIDER] ?? {};
  if (!baseUrl) return;
  const url = `${baseUrl.replace(/\/+$/, "")}/sessions/${encodeURIComponent(sessionId)}/end`;
  try {
    const response = await fetch(url, {
      method: "POST",
      headers: typeof apiKey === "string" ? { authorization: `Bearer ${apiKey}` } : {},
      signal: AbortSignal.timeout(5000),
    });
    if (!response.ok) api.logger?.warn?.(`openclaw-rl: end of session: HTTP ${response.status}`);
  } catch (error) {
    api.logger?.warn?.(`openclaw-rl: end of session: ${error?.name ?? "failed"}`);
  }
}

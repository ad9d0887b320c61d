// Reads one streamed chat completion, and collects its parts and times.
import { url } from "./store.js";

/** Yield the JSON of each server-sent event, until "[DONE]" or the end. */
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (text + value).split("\n\n");
    text = parts.pop();
    for (const part of parts) {
      const data = part.startsWith("data: ") ? part.slice(6) : "";
      if (data === "[DONE]") return;
      if (data) yield JSON.parse(data);
    }
  }
}

/** Return an answer that has not begun. */
export function newAnswer() {
  return { content: "", reasoning: "", calls: [], usage: null, finish: "", id: "", sent: performance.now(), first: 0, last: 0 };
}

/**
 * Send a chat and collect its answer in `answer`. Calls `changed` after each event.
 *
 * Throws an Error with the server's words, and its status if the server refused. Aborting the signal is not an error.
 */
export async function complete(chat, key, answer, changed, signal) {
  const headers = { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) };
  const body = JSON.stringify({ ...chat, stream: true, stream_options: { include_usage: true } });
  try {
    const response = await fetch(url("v1/chat/completions"), { method: "POST", headers, body, signal });
    if (!response.ok) {
      const refusal = await response.json().catch(() => null);
      throw Object.assign(new Error(refusal?.error?.message ?? `the server answered ${response.status}`), { status: response.status });
    }
    answer.id = response.headers.get("x-request-id") ?? "";
    for await (const chunk of events(response.body)) {
      if (chunk.error) throw new Error(chunk.error.message);
      take(answer, chunk);
      changed();
    }
  } catch (error) {
    if (!signal.aborted) throw error;
    answer.finish = "stopped";
  }
}

function take(answer, chunk) {
  if (chunk.usage) answer.usage = chunk.usage;
  const [choice] = chunk.choices ?? [];
  if (!choice) return;
  const { delta } = choice;
  const reasoning = delta.reasoning ?? delta.reasoning_content ?? "";
  if (delta.content || reasoning || delta.tool_calls) {
    answer.last = performance.now();
    answer.first ||= answer.last;
  }
  answer.content += delta.content ?? "";
  answer.reasoning += reasoning;
  for (const part of delta.tool_calls ?? []) {
    const call = (answer.calls[part.index] ??= { id: "", name: "", arguments: "" });
    call.id ||= part.id ?? "";
    call.name ||= part.function?.name ?? "";
    call.arguments += part.function?.arguments ?? "";
  }
  if (choice.finish_reason) answer.finish = choice.finish_reason;
}

/** Return the message to send back as part of the conversation. */
export function asMessage(answer) {
  const message = { role: "assistant", content: answer.content || null };
  if (answer.reasoning) message.reasoning = answer.reasoning;
  if (answer.calls.length) {
    message.tool_calls = answer.calls.map(({ id, name, arguments: text }) => ({ id, type: "function", function: { name, arguments: text } }));
  } else {
    message.content ??= "";
  }
  return message;
}

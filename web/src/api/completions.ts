// Streams a completion: Server-Sent Events in the body of a POST, parsed as they arrive.

import type { CompletionRequest } from "./actions";
import type { Client } from "./client";
import { NodeError } from "./client";

interface Piece {
  choices?: { text?: string; delta?: { content?: string }; finish_reason?: string | null }[]; // of a text or of a conversation
  error?: { message?: string };
  title?: string;
  detail?: string;
}

const FINISHES: Record<string, string> = { length: "It reached the number of tokens you asked for.", stop: "It came to an end." };

/** Resolves with why the text ended. Aborting the signal closes the stream, and the node stops writing. */
export async function streamCompletion(
  client: Client,
  request: CompletionRequest,
  signal: AbortSignal,
  onPiece: (text: string) => void,
): Promise<string> {
  const { prompt, maxTokens, temperature } = request;
  const terms = { max_tokens: maxTokens, temperature, stream: true };
  const response =
    typeof prompt === "string"
      ? await client.open("/v1/completions", { prompt, ...terms }, signal)
      : await client.open("/v1/chat/completions", { messages: prompt, ...terms }, signal);
  if (!response.body) throw new NodeError("The node sent no text.", response.status);
  let finish = "";
  for await (const data of events(response.body)) {
    if (data === "[DONE]") break;
    const piece = JSON.parse(data) as Piece;
    const trouble = piece.error?.message ?? piece.detail;
    if (trouble) throw new NodeError(trouble, response.status);
    const choice = piece.choices?.[0];
    const text = choice?.text ?? choice?.delta?.content;
    if (text) onPiece(text);
    if (choice?.finish_reason) finish = choice.finish_reason;
  }
  return FINISHES[finish] ?? "";
}

/** The data fields of an event stream, one string an event. */
async function* events(stream: ReadableStream<Uint8Array>): AsyncGenerator<string> {
  const reader = stream.pipeThrough(new TextDecoderStream() as ReadableWritablePair<string, Uint8Array>).getReader();
  let buffer = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      buffer = (buffer + value).replaceAll("\r\n", "\n");
      for (let end = buffer.indexOf("\n\n"); end >= 0; end = buffer.indexOf("\n\n")) {
        const lines = buffer.slice(0, end).split("\n");
        buffer = buffer.slice(end + 2);
        const data = lines.filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trimStart());
        if (data.length > 0) yield data.join("\n");
      }
    }
  } finally {
    await reader.cancel();
  }
}

// Talk to the model in training: streamed, cancellable, honest about how little it has seen.

import { useEffect, useRef, useState } from "preact/hooks";
import type { NodeActions, Turn } from "../api/actions";
import { plural } from "../format";
import { Card } from "./parts";

interface Props {
  steps: number;
  ready: boolean;
  actions: NodeActions;
}

interface Reply {
  prompt: string;
  text: string;
  steps: number; // of the model when it was asked
  state: "running" | "done" | "cancelled" | "failed";
  note: string;
}

const MAX_REPLY_CHARACTERS = 20_000;

export function Chat({ steps, ready, actions }: Props) {
  const [prompt, setPrompt] = useState("The function returns");
  const [temperature, setTemperature] = useState(0.8);
  const [maxTokens, setMaxTokens] = useState(60);
  const [reply, setReply] = useState<Reply | null>(null);
  const [turns, setTurns] = useState<readonly Turn[] | null>(null); // of a conversation; null: it continues a text
  const abort = useRef<AbortController | null>(null);
  useEffect(() => () => abort.current?.abort(), []);
  const running = reply?.state === "running";

  const ask = async () => {
    const controller = new AbortController();
    abort.current = controller;
    const asked: Reply = { prompt, text: "", steps, state: "running", note: "" };
    const said: readonly Turn[] | null = turns && [...turns, { role: "user", content: prompt }];
    // A reply that was cancelled stays with the text that it has. A message without any answer goes back into its field.
    const keep = (answer: string) => {
      if (said) setTurns([...said, { role: "assistant", content: answer }]);
    };
    setReply(asked);
    if (said) setPrompt("");
    let text = "";
    try {
      const finish = await actions.complete({ prompt: said ?? prompt, temperature, maxTokens }, controller.signal, (piece) => {
        text = (text + piece).slice(0, MAX_REPLY_CHARACTERS);
        setReply({ ...asked, text });
      });
      setReply({ ...asked, text, state: "done", note: finish });
      keep(text);
    } catch (error) {
      const cancelled = controller.signal.aborted;
      const note = cancelled ? "Stopped by you." : error instanceof Error ? error.message : String(error);
      setReply({ ...asked, text, state: cancelled ? "cancelled" : "failed", note });
      if (cancelled && text) keep(text);
      else if (said) setPrompt((since) => since || prompt);
    }
  };

  return (
    <Card title="Talk to the model" hint="It continues whatever you write. It learned from scratch, so early on expect nonsense." wide>
      {turns && <Conversation turns={turns} reply={reply} />}
      <form
        class="chat"
        onSubmit={(event) => {
          event.preventDefault();
          if (running) abort.current?.abort();
          else if (ready) void ask();
        }}
      >
        <label class="chat-prompt">
          <span>{turns ? "Your message" : "Your text"}</span>
          <textarea rows={2} maxLength={4000} required={!running} value={prompt} onInput={(event) => setPrompt(event.currentTarget.value)} />
        </label>
        <div class="chat-options">
          <label>
            <span>
              Temperature <b class="muted">{temperature.toFixed(1)}</b>
            </span>
            <input
              type="range"
              min={0}
              max={1.5}
              step={0.1}
              value={temperature}
              onInput={(event) => setTemperature(Number(event.currentTarget.value))}
            />
          </label>
          <label>
            <span>Max tokens</span>
            <input
              type="number"
              min={1}
              max={512}
              required
              value={maxTokens}
              onInput={(event) => setMaxTokens(Number(event.currentTarget.value))}
            />
          </label>
          <button type="submit" class={`button ${running ? "" : "button-primary"}`} aria-disabled={!ready && !running}>
            {running ? "Cancel" : turns ? "Send" : "Continue the text"}
          </button>
          <label class="chat-mode">
            <input
              type="checkbox"
              checked={turns !== null}
              disabled={running}
              onChange={(event) => {
                setTurns(event.currentTarget.checked ? [] : null);
                setReply(null);
              }}
            />
            <span>Conversation: it reads what both of you wrote before</span>
          </label>
        </div>
      </form>
      <ReplyText reply={reply} steps={steps} ready={ready} isConversation={turns !== null} />
    </Card>
  );
}

/** All that both have written, with the reply that is under way. */
function Conversation({ turns, reply }: { turns: readonly Turn[]; reply: Reply | null }) {
  const open: readonly Turn[] = reply?.state === "running" ? [{ role: "user", content: reply.prompt }, { role: "assistant", content: reply.text }] : [];
  const shown = [...turns, ...open];
  return shown.length === 0 ? null : (
    <ol class="turns" aria-label="Conversation" aria-busy={reply?.state === "running"}>
      {shown.map(({ role, content }, place) => (
        <li key={place} class={role === "user" ? "turn-own" : ""}>
          <b class="small muted">{role === "user" ? "You" : "Model"}</b>
          <p>{content}</p>
        </li>
      ))}
    </ol>
  );
}

function ReplyText({ reply, steps, ready, isConversation }: { reply: Reply | null; steps: number; ready: boolean; isConversation: boolean }) {
  if (!reply) {
    const note = ready ? `The model has taken ${plural(steps, "learning step")} so far.` : "The model cannot be asked right now.";
    return <p class="muted small chat-note">{note}</p>;
  }
  const model = `Written by the model after ${plural(reply.steps, "learning step")}.`;
  return (
    <div class="reply">
      {!isConversation && (
        <pre class="reply-text" data-testid="reply" tabIndex={0} aria-label="The model's text" aria-busy={reply.state === "running"}>
          <span class="muted">{reply.prompt}</span>
          {reply.text}
          {reply.state === "running" && <span class="caret" aria-hidden="true" />}
        </pre>
      )}
      <p class={`small chat-note ${reply.state === "failed" ? "text-bad" : "muted"}`} role="status">
        {reply.state === "running" ? "Writing…" : `${reply.note} ${reply.state === "failed" ? "" : model}`}
      </p>
    </div>
  );
}

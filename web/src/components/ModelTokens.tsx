// Tokens for programs that use the model: make one, and remove it.

import type { ModelTokensBody, NewTokenBody } from "../api/bodies";
import { useEffect, useState } from "preact/hooks";
import type { NodeActions } from "../api/actions";
import { dateAndTime } from "../format";
import { Fault, Field, useSending } from "../setup/fields";
import { TOKENS } from "../words/tokens";
import { CopyLine } from "./CopyLine";
import { Card } from "./parts";

const NAME_FIELD = "token-name";

export function ModelTokens({ reachable, actions }: { reachable: boolean; actions: NodeActions }) {
  const [body, setBody] = useState<ModelTokensBody | null>(null);
  const [name, setName] = useState("");
  const [made, setMade] = useState<NewTokenBody | null>(null);
  const { busy, faults, send } = useSending(["name"]);
  const read = async () => setBody(await actions.readModelTokens());
  useEffect(() => {
    if (reachable) read().catch(() => setBody(null));
  }, [reachable]);
  const make = async () => {
    setMade(await actions.makeModelToken(name));
    setName("");
    await read();
  };
  const remove = (one: string) => async () => {
    await actions.removeModelToken(one);
    if (made?.name === one) setMade(null);
    await read();
    document.getElementById(NAME_FIELD)?.focus(); // the button is gone
  };
  return (
    <Card title={TOKENS.title} hint={TOKENS.hint} wide>
      <p>{TOKENS.address}</p>
      <CopyLine text={`${location.origin}/v1`} name={TOKENS.addressName} />
      <form
        class="token-form"
        onSubmit={(event) => {
          event.preventDefault();
          send(make);
        }}
      >
        <Field id={NAME_FIELD} label={TOKENS.name} value={name} onInput={setName} placeholder="openai" fault={faults.fields.name} />
        <button type="submit" class="button" aria-disabled={busy || !reachable}>
          {TOKENS.make}
        </button>
      </form>
      <Fault id="token-fault" text={faults.other} />
      {made && (
        <div role="status">
          <p>{TOKENS.once}</p>
          <CopyLine text={made.token} name={TOKENS.token(made.name)} />
        </div>
      )}
      {body && body.tokens.length > 0 && (
        <ul class="members">
          {body.tokens.map((one) => (
            <li key={one.name}>
              <span>
                <strong>{one.name}</strong> <span class="muted small">{TOKENS.since(dateAndTime(one.made_at))}</span>
              </span>
              <button type="button" class="button" aria-disabled={busy || !reachable} aria-label={`${TOKENS.remove}: ${one.name}`} onClick={() => send(remove(one.name))}>
                {TOKENS.remove}
              </button>
            </li>
          ))}
        </ul>
      )}
    </Card>
  );
}

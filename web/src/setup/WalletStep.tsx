// Make a wallet, or enter one.

import { useState } from "preact/hooks";
import { Buttons, Choice, Fault, useSending } from "./fields";
import type { StepProps } from "./Wizard";

const LONGEST_TOKEN = 4096; // characters that the node takes

type Source = "keep" | "create" | "enter" | "found";

export function WalletStep({ setup, calls, onChange, go }: StepProps) {
  const { wallet, folder } = setup;
  const found = folder.wallet_id !== null && folder.wallet_id !== wallet?.wallet_id ? folder.wallet_id : null;
  const [source, setSource] = useState<Source>(wallet ? "keep" : found ? "found" : "create");
  const [phrase, setPhrase] = useState("");
  const [isText, setIsText] = useState(false);
  const { busy, faults, clear, send } = useSending();
  const submit = async () => {
    if (source === "keep" && wallet) return go(wallet.confirmed ? "computer" : "words");
    if (source === "enter") return onChange(await calls.chooseWallet("enter", phrase, isText), "computer");
    onChange(await calls.chooseWallet(source === "found" ? "found" : "create"), source === "found" ? "computer" : "words");
  };
  const choose = (chosen: Source) => () => {
    clear();
    setSource(chosen);
  };
  const fault = faults.fields.phrase;
  const mayBeText = isText || (fault ?? "").includes("this text has");
  return (
    <form
      onSubmit={(event) => {
        event.preventDefault();
        send(submit);
      }}
    >
      <h1 tabIndex={-1}>Which wallet?</h1>
      <p>
        A wallet signs the work of your computer, so that the work counts as yours. It costs nothing and is tied to no name.
      </p>
      <fieldset>
        <legend class="hidden-visually">Wallet</legend>
        {wallet && (
          <Choice type="radio" name="source" label="Keep the wallet of this set-up" about={<Id of={wallet.wallet_id} />} checked={source === "keep"} onChange={choose("keep")} />
        )}
        {found && (
          <Choice type="radio" name="source" label="Use the wallet found in the data folder" about={<Id of={found} />} checked={source === "found"} onChange={choose("found")} />
        )}
        <Choice type="radio" name="source" label="Make a new wallet" about="Twelve words that you write down." checked={source === "create"} onChange={choose("create")} />
        <Choice type="radio" name="source" label="I have a wallet" about="Enter its words, or its key." checked={source === "enter"} onChange={choose("enter")} />
      </fieldset>
      {source === "enter" && (
        <div class="setup-field">
          <label for="phrase">Wallet phrase</label>
          <textarea
            id="phrase"
            rows={3}
            maxLength={LONGEST_TOKEN}
            value={phrase}
            autocomplete="off"
            autocapitalize="none"
            spellcheck={false}
            aria-invalid={fault ? true : undefined}
            aria-describedby={`phrase-hint${fault ? " phrase-fault" : ""}`}
            onInput={(event) => setPhrase(event.currentTarget.value)}
          />
          <p class="muted small" id="phrase-hint">
            12 or 24 words with spaces between them, or 64 hex digits.
          </p>
          <Fault id="phrase-fault" text={fault} />
          {mayBeText && (
            <Choice type="checkbox" name="text" label="My token is another text" about="Each text belongs to a different wallet. A typing mistake leads to a wrong wallet." checked={isText} onChange={setIsText} />
          )}
        </div>
      )}
      <Fault id="wallet-fault" text={faults.other || faults.fields.data_dir} />
      <Buttons next="Next" busy={busy} back={setup.arrival.purpose === "given" ? undefined : () => go("arrive")} />
    </form>
  );
}

function Id({ of }: { of: string }) {
  return (
    <>
      Wallet <span class="mono">{of.slice(0, 8)}</span>
    </>
  );
}

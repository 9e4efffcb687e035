// What the wizard asks of a node without a token, and which step may be shown. Nothing is kept in the browser.

import type { Client } from "../api/client";
import { NodeError } from "../api/client";

export interface SetupWallet {
  origin: "created" | "entered" | "found";
  wallet_id: string;
  words: string[];
  asked: number[];
  confirmed: boolean;
  warning: string | null;
}

export interface SetupField {
  value: string | number | boolean | null;
  fixed_by: string | null;
  measured: string | number | boolean | null;
  allowed: string;
}

export interface Setup {
  wallet: SetupWallet | null;
  folder: { path: string; fixed_by: string | null; free_mb: number | null; wallet_id: string | null };
  settings: Record<string, SetupField>;
  autostart: { possible: boolean; how: string; wanted: boolean };
  chosen: boolean;
}

export interface Choices {
  data_dir?: string;
  settings?: Record<string, unknown>;
  autostart?: boolean;
}

export interface Finished {
  message: string;
  url: string;
  warning: string | null;
}

export interface SetupCalls {
  read: () => Promise<Setup>;
  chooseWallet: (source: "create" | "enter" | "found", phrase?: string, isText?: boolean) => Promise<Setup>;
  confirm: (words: string[]) => Promise<Setup>;
  choose: (choices: Choices) => Promise<Setup>;
  finish: () => Promise<Finished>;
  isNode: () => Promise<boolean>; // whether the node answers in the wizard's place
  openDashboard: () => void;
  unlock: (secret: string) => Promise<boolean>;
}

export function setupCalls(client: Client, openDashboard: () => void): SetupCalls {
  return {
    read: () => client.get<Setup>("/api/setup"),
    chooseWallet: (source, phrase, isText) =>
      client.command<Setup>("/api/setup/wallet", { source, ...(phrase === undefined ? {} : { phrase, is_text: isText === true }) }),
    confirm: (words) => client.command<Setup>("/api/setup/backup", { words }),
    choose: (choices) => client.command<Setup>("/api/setup/choices", choices),
    finish: () => client.command<Finished>("/api/setup/finish", {}),
    isNode: async () => {
      try {
        return (await client.get<{ status: string }>("/health")).status !== "setup";
      } catch (error) {
        return error instanceof NodeError && error.status === 401; // a node with --host asks for its secret
      }
    },
    openDashboard,
    unlock: async (secret) => (await client.openSession(secret)).authenticated,
  };
}

export const STEPS = ["wallet", "words", "check", "computer", "work", "start"] as const;
export type Step = (typeof STEPS)[number];

/** The step that was asked for, when what comes before it is done; else the one to go on with. */
export function allowedStep(setup: Setup, wanted: string | null): Step {
  const next = nextStep(setup);
  if (wanted === "wallet") return "wallet";
  if (setup.wallet === null) return next;
  if (!setup.wallet.confirmed) return wanted === "check" ? "check" : "words";
  if (wanted === "computer" || wanted === "work") return wanted;
  return next;
}

function nextStep(setup: Setup): Step {
  if (setup.wallet === null) return "wallet";
  if (!setup.wallet.confirmed) return "words";
  return setup.chosen ? "start" : "computer";
}

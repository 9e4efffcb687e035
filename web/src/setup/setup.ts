// Requests of the wizard to a node without a token, and the step that may be shown. Nothing is kept in the browser.

import type { FinishedBody, FolderListBody, SetupBody } from "../api/bodies";
import type { Client } from "../api/client";

export interface Choices {
  data_dir?: string;
  settings?: Record<string, unknown>;
  autostart?: boolean;
}

/** The answer to the first question. */
export type Answer = { purpose: "join" } | { purpose: "nearby"; run_id: string } | { purpose: "text"; folder: string };

export interface SetupCalls {
  read: () => Promise<SetupBody>;
  readInvitation: (text: string) => Promise<SetupBody>;
  choosePurpose: (answer: Answer) => Promise<SetupBody>;
  listFolder: (path: string | null) => Promise<FolderListBody>; // null: the home folder
  startDemo: () => Promise<FinishedBody>;
  chooseWallet: (source: "create" | "enter" | "found", phrase?: string, isText?: boolean) => Promise<SetupBody>;
  confirm: (words: string[]) => Promise<SetupBody>;
  choose: (choices: Choices) => Promise<SetupBody>;
  finish: () => Promise<FinishedBody>;
  isNode: () => Promise<boolean>; // whether the node answers in the wizard's place
  openDashboard: () => void;
}

export function setupCalls(client: Client, openDashboard: () => void): SetupCalls {
  return {
    read: () => client.get<SetupBody>("/api/setup"),
    readInvitation: (text) => client.command<SetupBody>("/api/setup/invitation", { text }),
    choosePurpose: (answer) => client.command<SetupBody>("/api/setup/purpose", answer),
    listFolder: (path) => client.command<FolderListBody>("/api/setup/folders", { path }),
    startDemo: () => client.command<FinishedBody>("/api/setup/demo", {}),
    chooseWallet: (source, phrase, isText) =>
      client.command<SetupBody>("/api/setup/wallet", { source, ...(phrase === undefined ? {} : { phrase, is_text: isText === true }) }),
    confirm: (words) => client.command<SetupBody>("/api/setup/backup", { words }),
    choose: (choices) => client.command<SetupBody>("/api/setup/choices", choices),
    finish: () => client.command<FinishedBody>("/api/setup/finish", {}),
    isNode: async () => {
      try {
        return (await client.get<{ status: string }>("/health")).status !== "setup";
      } catch {
        return false;
      }
    },
    openDashboard,
  };
}

export const STEPS = ["arrive", "invitation", "text", "wallet", "words", "check", "computer", "work", "start"] as const;
export type Step = (typeof STEPS)[number];

/** The requested step when the steps before it are done; otherwise the next step to do. */
export function allowedStep(setup: SetupBody, wanted: string | null): Step {
  const next = nextStep(setup);
  const { purpose } = setup.arrival;
  if (purpose !== "given" && (wanted === "arrive" || wanted === "invitation" || wanted === "text")) return wanted;
  if (purpose === null) return next;
  if (wanted === "wallet") return "wallet";
  if (setup.wallet === null) return next;
  if (!setup.wallet.confirmed) return wanted === "check" ? "check" : "words";
  if (wanted === "computer" || wanted === "work") return wanted;
  return next;
}

function nextStep(setup: SetupBody): Step {
  const { purpose, invitation, link_fault: linkFault } = setup.arrival;
  if (purpose === null) return invitation !== null || linkFault !== null ? "invitation" : "arrive";
  if (setup.wallet === null) return "wallet";
  if (!setup.wallet.confirmed) return "words";
  return setup.chosen ? "start" : "computer";
}

// What a reader may ask of the node, each with the sentence that the node answers.

import type { Client } from "./client";
import { streamCompletion } from "./completions";
import type { Contribution, Samples, Span } from "../state/contribution";
import type { Pipeline } from "../state/pipeline";
import type { Rounds } from "../state/rounds";
import type { Setting } from "../views/setting-rows";

export interface CompletionWish {
  prompt: string;
  temperature: number;
  maxTokens: number;
}

export interface NodeActions {
  pause: (seconds?: number) => Promise<string>;
  resume: () => Promise<string>;
  stop: () => Promise<string>;
  saveCheckpoint: () => Promise<string>;
  complete: (wish: CompletionWish, signal: AbortSignal, onPiece: (text: string) => void) => Promise<string>;
  readPipeline: () => Promise<Pipeline>;
  readRounds: () => Promise<Rounds>;
  readContribution: (span: Span) => Promise<Contribution>;
  readSamples: () => Promise<Samples>;
  downloadReport: () => Promise<Download>;
  readSettings: () => Promise<Record<string, Setting>>;
  changeSetting: (name: string, value: unknown) => Promise<string>;
  unlock: (secret: string) => Promise<boolean>;
}

export interface Download {
  name: string;
  content: Blob;
}

interface Outcome {
  state: string;
  message: string;
}

export function nodeActions(client: Client, onStop: (asked: boolean) => void, onUnlocked: () => void): NodeActions {
  const send = async (path: string, body: unknown = {}) => (await client.command<Outcome>(path, body)).message;
  return {
    pause: (seconds) => send("/api/training/pause", seconds === undefined ? {} : { duration_seconds: seconds }),
    resume: () => send("/api/training/resume"),
    saveCheckpoint: () => send("/api/checkpoints"),
    stop: async () => {
      onStop(true);
      try {
        return await send("/api/shutdown");
      } catch (error) {
        onStop(false);
        throw error;
      }
    },
    complete: (wish, signal, onPiece) => streamCompletion(client, wish, signal, onPiece),
    readPipeline: () => client.get<Pipeline>("/api/pipeline"),
    readRounds: () => client.get<Rounds>("/api/rounds"),
    readContribution: (span) => client.get<Contribution>(`/api/contribution?span=${span}`),
    readSamples: () => client.get<Samples>("/api/samples"),
    downloadReport: () => client.download("/api/diagnostics"),
    readSettings: () => client.get<Record<string, Setting>>("/api/config"),
    changeSetting: async (name, value) => (await client.command<Outcome>("/api/config", { [name]: value }, "PATCH")).message,
    unlock: async (secret) => {
      const session = await client.openSession(secret);
      if (session.authenticated) onUnlocked();
      return session.authenticated;
    },
  };
}

// The commands that a reader may send to the node, each with the sentence that the node answers.

import type { MadeInvitationBody, MembersBody, ModelTokensBody, NewTokenBody, PresetsBody } from "./bodies";
import type { CommandBody, FeedSummary, MachineList, PipelineSummary, RoundsSummary, SamplesStatus, WorkSummary } from "./responses";
import type { Client } from "./client";
import { streamCompletion } from "./completions";
import type { Span } from "../state/contribution";
import type { Setting } from "../views/setting-rows";

export interface Turn {
  role: "user" | "assistant";
  content: string;
}

/** A text to continue, or a conversation to answer. */
export interface CompletionRequest {
  prompt: string | readonly Turn[];
  temperature: number;
  maxTokens: number;
}

export interface NodeActions {
  pause: (seconds?: number) => Promise<string>;
  resume: () => Promise<string>;
  stop: () => Promise<string>;
  restart: () => Promise<string>;
  saveCheckpoint: () => Promise<string>;
  complete: (request: CompletionRequest, signal: AbortSignal, onPiece: (text: string) => void) => Promise<string>;
  readPipeline: () => Promise<PipelineSummary>;
  readRounds: () => Promise<RoundsSummary>;
  readFeed: () => Promise<FeedSummary>;
  readContribution: (span: Span) => Promise<WorkSummary>;
  readSamples: () => Promise<SamplesStatus>;
  downloadReport: () => Promise<Download>;
  readSettings: () => Promise<Record<string, Setting>>;
  changeSettings: (values: Record<string, unknown>) => Promise<string>;
  readPresets: () => Promise<PresetsBody>;
  readMembers: () => Promise<MembersBody>;
  invite: (terms: InvitationTerms) => Promise<MadeInvitationBody>;
  revoke: (key: string) => Promise<string>;
  nameDeputy: (wallet: string) => Promise<string>;
  answerKnock: (wallet: string, isAllowed: boolean) => Promise<string>;
  showInvitation: (text: string) => Promise<unknown>;
  closeInvitation: () => Promise<unknown>;
  join: (runId: string | null) => Promise<string>;
  readModelTokens: () => Promise<ModelTokensBody>;
  makeModelToken: (name: string) => Promise<NewTokenBody>;
  removeModelToken: (name: string) => Promise<string>;
  readMachines: () => Promise<MachineList>;
  orderMachines: (step: MachineStep, nodeId?: string) => Promise<MachineList>;
}

/** The only two commands that the machines of a wallet send each other. */
export type MachineStep = "pause" | "resume";

export interface InvitationTerms {
  label: string;
  uses: number;
  days: number;
  may_invite: boolean;
}

export interface Download {
  name: string;
  content: Blob;
}

export function nodeActions(client: Client, onStop: (asked: boolean) => void): NodeActions {
  const send = async (path: string, body: unknown = {}) => (await client.command<CommandBody>(path, body)).message;
  return {
    pause: (seconds) => send("/api/training/pause", seconds === undefined ? {} : { duration_seconds: seconds }),
    resume: () => send("/api/training/resume"),
    saveCheckpoint: () => send("/api/checkpoints"),
    restart: () => send("/api/restart"),
    stop: async () => {
      onStop(true);
      try {
        return await send("/api/shutdown");
      } catch (error) {
        onStop(false);
        throw error;
      }
    },
    complete: (request, signal, onPiece) => streamCompletion(client, request, signal, onPiece),
    readPipeline: () => client.get<PipelineSummary>("/api/pipeline"),
    readRounds: () => client.get<RoundsSummary>("/api/rounds"),
    readFeed: () => client.get<FeedSummary>("/api/feed"),
    readContribution: (span) => client.get<WorkSummary>(`/api/contribution?span=${span}`),
    readSamples: () => client.get<SamplesStatus>("/api/samples"),
    downloadReport: () => client.download("/api/diagnostics"),
    readSettings: () => client.get<Record<string, Setting>>("/api/config"),
    readMembers: () => client.get<MembersBody>("/api/members"),
    invite: (terms) => client.command<MadeInvitationBody>("/api/invitations", terms),
    revoke: (key) => send("/api/invitations/revoke", { named: key }),
    nameDeputy: (wallet) => send("/api/deputies", { named: wallet }),
    answerKnock: (wallet, isAllowed) => send("/api/knocks", { wallet_id: wallet, is_allowed: isAllowed }),
    showInvitation: (text) => client.command("/api/invitation", { text }),
    closeInvitation: () => client.command("/api/invitation/close", {}),
    join: (runId) => send("/api/join", { run_id: runId }),
    readModelTokens: () => client.get<ModelTokensBody>("/api/model-tokens"),
    makeModelToken: (name) => client.command<NewTokenBody>("/api/model-tokens", { name }),
    removeModelToken: (name) => send("/api/model-tokens/remove", { name }),
    readMachines: () => client.get<MachineList>("/api/machines"),
    orderMachines: (step, nodeId) => client.command<MachineList>(`/api/machines/${step}`, nodeId === undefined ? {} : { node_id: nodeId }),
    changeSettings: async (values) => (await client.command<CommandBody>("/api/config", values, "PATCH")).message,
    readPresets: () => client.get<PresetsBody>("/api/presets"),
  };
}

// The wizard's and the owner's responses, generated from the declarations in neuroshard/status and neuroshard/api. Do not edit.
// After a change there: python -m neuroshard.api.typescript web/src/api

import type {
  JsonValue,
} from "./responses";

/** The first question of the wizard, and the answer so far. */
export interface ArrivalBody {
  purpose: "join" | "nearby" | "text" | "given" | null; // null: not answered yet
  invitation: InvitationBody | null; // the one that was read last
  link_fault: string | null; // why a link that was opened cannot be used
  text: TextFolderBody | null;
  public_run: string | null; // name of this release's own run; null: there is none yet
  nearby: NearbyRunBody[] | null; // runs on the local network; null: it is not searched
  nearby_run: NearbyRunBody | null; // the one that was chosen
}

/** 202: stored; the node starts. */
export interface FinishedBody {
  message: string;
  url: string; // where the dashboard will be
  warning: string | null; // what did not work although the rest did
}

/** A folder of this computer and its subfolders. Files and links are not listed. */
export interface FolderListBody {
  folder: TextFolderBody;
  parent: string | null; // the folder above it; null: there is none
  folders: TextFolderBody[];
  has_more: boolean; // more folders than are listed
  drives: string[]; // drives of this computer on Windows; empty elsewhere
}

/** An invitation as its page shows it. It contains nothing that lets its reader join. */
export interface InvitationBody {
  name: string; // of the run
  run_id: string;
  label: string; // that the inviter gave this invitation
  inviter_words: string; // four words for the key of the run's owner
  is_by_guest: boolean; // a member that may invite made it, not the owner
  uses: number; // number of wallets that can join with it
  may_invite: boolean; // whether the invited can invite others
  not_after: number; // time at which it ends, seconds since 1970
  data: string[]; // addresses of the run's training text; empty: its nodes send it
  nodes: number; // addresses of nodes in it that can be dialled from here
  model: InvitedModelBody | null; // null: the invitation does not state it
  gb_per_day: number | null; // most that this computer sends in a day at its limits; null: no limit
}

/** The run's model, as the inviter states it. */
export interface InvitedModelBody {
  parameters: number;
  stages: number;
  stage_mb: number; // memory with which a computer can hold the smallest stage, megabytes of 10^6 bytes
  fits: boolean; // whether the memory limit of this computer is enough for that
}

/** An invitation that was made on this computer. */
export interface IssuedBody {
  label: string;
  key: string; // first digits of its key
  uses: number;
  left: number; // wallets that can still join with it
  not_after: number;
  state: "valid" | "expired" | "revoked";
}

/** A computer of the local network that asks to join. */
export interface KnockBody {
  wallet_id: string;
  name: string;
  words: string; // four words for its wallet's key
}

/** A run that was joined from this computer. */
export interface KnownRunBody {
  run_id: string;
  name: string;
  is_current: boolean;
}

/** The upload of this computer's line. */
export interface LineBody {
  upload: number; // megabits per second, measured or assumed
  measured_at: number | null; // seconds since the epoch; null: not measured yet, so it is assumed
}

/** A new invitation. It is shown only now: the node does not keep its secret. */
export interface MadeInvitationBody {
  message: string;
  label: string;
  link: string;
  qr: string[]; // rows of the QR code of the link; 1: a dark module
}

/** A wallet that joined with an invitation. */
export interface MemberBody {
  wallet_id: string;
  label: string;
  words: string; // four words for the wallet's key
}

/** GET /api/members: the run's invitations and members, and the runs that this computer knows. */
export interface MembersBody {
  run: RunMembersBody | null; // null: this node serves no run with invitations
  runs: KnownRunBody[];
  knocks: KnockBody[];
  nearby: NearbyRunBody[] | null; // other runs on the local network; null: it is not searched
  shown: ShownLinkBody;
}

/** A token of a program; the node does not know its text. */
export interface ModelTokenBody {
  name: string;
  made_at: number;
}

/** GET /api/model-tokens: the tokens with which programs use the model. */
export interface ModelTokensBody {
  tokens: ModelTokenBody[];
}

/** A run that a node of the local network announces. */
export interface NearbyRunBody {
  run_id: string;
  name: string;
  computers: number; // that take part, as the node says
}

/** A new token. It is shown only now. */
export interface NewTokenBody {
  name: string;
  token: string;
}

/** Settings that belong together, and what they cost. */
export interface PresetBody {
  name: "light" | "balanced" | "everything";
  settings: Record<string, boolean | number | null>; // values to send to /api/config; null removes a limit
  upload: number | null; // most that this computer sends, in megabits per second; null: no limit
  gb_per_day: number | null; // most that this computer sends in a day; null: no limit
}

/** All presets of this computer. */
export interface PresetsBody {
  presets: PresetBody[];
  line: LineBody;
  chosen: "light" | "balanced" | "everything" | null; // the one whose values the settings have; null: other limits
  has_limits: boolean; // whether the settings limit memory, upload or speed; by default they do not
  after_restart: string[]; // settings of the presets that are stored for the next start
}

/** The run of friends, or organised run, that this node serves. */
export interface RunMembersBody {
  run_id: string;
  name: string;
  is_owner: boolean;
  may_invite: boolean;
  has_deputies: boolean; // whether the owner can name deputies: in a run of friends
  deputies: string[]; // wallets that may found the run again while the owner is away
  invitations: IssuedBody[];
  members: MemberBody[];
}

/** Whether the node will start with the computer, and how. */
export interface SetupAutostart {
  possible: boolean;
  how: string; // what would be written where, or why it is not possible
  wanted: boolean;
}

/** Everything that the wizard shows. */
export interface SetupBody {
  wallet: SetupWallet | null;
  folder: SetupFolder;
  settings: Record<string, SetupField>;
  autostart: SetupAutostart;
  presets: PresetsBody;
  gpus: string[]; // GPUs that may train, with their memory; empty: the processor trains
  arrival: ArrivalBody;
  chosen: boolean; // whether folder and settings were sent once
}

/** One setting that the wizard asks for. */
export interface SetupField {
  value: JsonValue; // null: the default, or what is measured
  fixed_by: string | null; // the flag or variable that decides it, if one does
  measured: JsonValue; // what null leads to on this computer; null: no limit
  allowed: string;
}

/** The chosen data folder, with the space and the wallet in it. */
export interface SetupFolder {
  path: string;
  fixed_by: string | null; // the flag or variable that decides it, if one does
  free_mb: number | null; // space on its disk, megabytes of 10^6 bytes; null: not known
  wallet_id: string | null; // the wallet that this folder holds already
}

/** The wallet that will be stored. */
export interface SetupWallet {
  origin: "created" | "entered" | "found";
  wallet_id: string;
  words: string[]; // of a new wallet, until the owner has given some of them back; then empty
  asked: number[]; // places of the words to give back, from 1
  confirmed: boolean;
  warning: string | null;
}

/** The invitation that was opened or pasted last. */
export interface ShownLinkBody {
  invitation: InvitationBody | null;
  fault: string | null; // why a link that was opened cannot be used
}

/** A folder, and the text files in it and its subfolders. */
export interface TextFolderBody {
  path: string;
  files: number;
  bytes: number;
  is_complete: boolean; // false: at least this many, or a part cannot be read
}

-- Second lock of the drafts repository (the first is the signature that the promoter, `tide reconcile` and each engine
-- verify). Holds no secret: it looks whether a merge into main carries a record of a known kind, for this draft and
-- generation, and whether serving.json says the same.
local json, lakefs = require("encoding/json"), require("lakefs")
local record = action.commit.metadata or {}

local function refuse(why)
  error("tide: " .. why .. "; drafts reach main through the promote flow, `tide rollout` or `tide rollback`")
end

local function read(ref, path)
  local code, body = lakefs.get_object(action.repository_id, ref, path)
  if code == 200 then return body end
  if code == 404 then return nil end
  refuse("cannot read " .. path .. " (" .. tostring(code) .. ")")
end

local function read_json(ref, path)
  local body = read(ref, path)
  if body == nil then refuse("the merge has no " .. path) end
  return json.unmarshal(body)
end

local kind, draft, source = record["tide.kind"], record["tide.subject"], action.source_ref
if kind == "guard" then -- this file is changed; what serves may not be
  if read(source, "serving.json") ~= read("main", "serving.json") then refuse("a change of the guard may not change serving.json") end
  return
end
if kind ~= "promotion" and kind ~= "canary" and kind ~= "rollback" then refuse("the merge carries no record of a known kind") end

local generation = tonumber(record["tide.generation"] or "")
if draft == nil or generation == nil then refuse("the merge names no draft or no generation") end
local path = string.format("attestations/%06d.json", generation)
local attestation = json.unmarshal(read_json(source, path).payload)
if attestation.kind ~= kind then refuse(path .. " is a " .. tostring(attestation.kind) .. ", the merge a " .. kind) end
if attestation.draft ~= draft then refuse(path .. " is for draft " .. tostring(attestation.draft) .. ", the merge for " .. draft) end
if attestation.generation ~= generation then refuse(path .. " is for generation " .. tostring(attestation.generation)) end

local serving = read_json(source, "serving.json")
local named = serving.stable
if kind == "canary" then named = serving.canary end
local digest = named and (named.digest or named.draft)
if digest ~= draft then refuse("serving.json names draft " .. tostring(digest) .. ", the merge " .. draft) end
if serving.generation ~= generation then refuse("serving.json is at generation " .. tostring(serving.generation) .. ", the merge at " .. generation) end

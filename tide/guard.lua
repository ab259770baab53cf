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

local function same_draft(left, right)
  local a, b = left.stable or {}, right.stable or {}
  if left.generation ~= right.generation or a.digest ~= b.digest then refuse("a canary may not change what serves") end
end

local kind, draft, source = record["tide.kind"], record["tide.subject"], action.source_ref
if kind == "guard" then -- this file is changed; what serves may not be
  if read(source, "serving.json") ~= read("main", "serving.json") then refuse("a change of the guard may not change serving.json") end
  return
end
if kind ~= "promotion" and kind ~= "canary" and kind ~= "release" and kind ~= "rollback" then refuse("the merge carries no record of a known kind") end

local generation = tonumber(record["tide.generation"] or "")
if draft == nil or generation == nil then refuse("the merge names no draft or no generation") end
local serving = read_json(source, "serving.json")

if kind == "release" then -- a canary ends with the incumbent: only its lease may go
  same_draft(serving, read_json("main", "serving.json"))
  if serving.canary ~= nil then refuse("a release leaves no canary") end
  return
end

local name = "attestations/%06d.json"
if kind == "canary" then name = "attestations/%06d-canary.json" end
local path = string.format(name, generation)
local attestation = json.unmarshal(read_json(source, path).payload)
if attestation.kind ~= kind then refuse(path .. " is a " .. tostring(attestation.kind) .. ", the merge a " .. kind) end
if attestation.draft ~= draft then refuse(path .. " is for draft " .. tostring(attestation.draft) .. ", the merge for " .. draft) end
if attestation.generation ~= generation then refuse(path .. " is for generation " .. tostring(attestation.generation)) end

if kind == "canary" then -- the candidate is tried for the next generation; what serves stays
  local before = read("main", "serving.json")
  if before ~= nil then same_draft(serving, json.unmarshal(before))
  elseif serving.stable ~= nil or serving.generation ~= 0 then refuse("a canary may not change what serves") end
  local tried = serving.canary and serving.canary.draft
  if tried ~= draft then refuse("serving.json tries draft " .. tostring(tried) .. ", the merge " .. draft) end
  if serving.generation + 1 ~= generation then refuse("serving.json is at generation " .. tostring(serving.generation) .. ", the merge tries for " .. generation) end
  return
end

local digest = serving.stable and serving.stable.digest
if serving.canary ~= nil then refuse("a " .. kind .. " leaves no canary") end
if digest ~= draft then refuse("serving.json names draft " .. tostring(digest) .. ", the merge " .. draft) end
if serving.generation ~= generation then refuse("serving.json is at generation " .. tostring(serving.generation) .. ", the merge at " .. generation) end

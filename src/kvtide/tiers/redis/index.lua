#!lua flags=allow-oom
-- The index of a redis tier: which records are there, in which order they go. docs/formats.md.
--
-- All of it lies in one slot, so each call is one step that nobody sees half of. The bytes of
-- records are elsewhere, on any server: who is told of writes that are `given_up` removes their
-- parts, and says so with the next call.
--
--   index    key of a record -> row
--   tree     rows in order of (kind, parent, digests): children of one parent stand together
--   leaves   keys of records without children, by last use;  inner: those that have some
--   numbers  counters; of each kind its life, its records, who needs that life, and whose they are
--   loose    parts without a record: being written or being removed, and until when at most
--
-- A row: write id 16, kind 16, life of the kind 8, parent 32, bytes 16, parts 4, digests 16 * n.
-- One of `loose`: write id 16, parts 4, bytes 16; of what is being written its kind and life, 24.
-- A kind has a life as long as somebody needs it: each record, each store that has begun. One that
-- is cleared loses it; rows of a life that is over are not there, and are swept. A new one comes
-- from a counter. With `allow-oom` a server that is full is asked and cleared too.
--
-- An answer begins with its head: whether the index was whole (1), all bytes (16), how many writes
-- were given up (4). Those follow (20 each), and the kinds of the records that were removed (16).

local index, tree, leaves, inner, numbers, loose = unpack(KEYS)
local call, sub = redis.call, string.sub
local LAST, ZEROS, NOTHING = string.rep('\255', 32), string.rep('\0', 16), string.rep('0', 16)
local KEY_BYTES = 32
local LOOSE_S = 60 -- no writer lives that long: its own deadlines are shorter
local DROPPED_MAX = 256 -- by one call: others wait for it
local DESCENDANTS_MAX = 1000
local KINDS_MAX = 8192 -- told one by one: so much is read in a fraction of a call's time

local COUNTERS = { 'bytes', 'moment', 'life', 'dead', 'loose' }

local given_up, removed = {}, {}
local lives = {}
local counts, are_counts_changed = {}, false -- of COUNTERS; written at the end

local function add(field, count)
    counts[field] = counts[field] + count
    are_counts_changed = true
    return counts[field]
end

local function now_s() return tonumber(call('TIME')[1]) end

local function life_of(kind)
    if lives[kind] == nil then
        lives[kind] = call('HGET', numbers, 'i' .. kind) or ''
    end
    return lives[kind]
end

local function kind_of(row) return sub(row, 17, 32) end
local function name_of(row) return sub(row, 17, 40) end
local function parent_of(row) return sub(row, 41, 72) end
local function digests_of(row) return sub(row, 93) end
local function is_live(row) return life_of(kind_of(row)) == sub(row, 33, 40) end

local function member_of(key, row)
    return name_of(row) .. parent_of(row) .. digests_of(row) .. ZEROS .. sub(key, 17)
end

local function key_of(member) return sub(member, -48, -33) .. sub(member, -16) end

-- The first member at or behind `from` that begins with `prefix`.
local function first(prefix, from)
    return call('ZRANGEBYLEX', tree, '[' .. from, '[' .. prefix .. LAST, 'LIMIT', 0, 1)[1]
end

local function end_life(kind)
    call('HDEL', numbers, 'n' .. kind, 'i' .. kind, 'k' .. kind, 'u' .. kind)
    lives[kind] = nil
end

-- One less needs the life of a kind. `name`: both of them; nothing, where none was needed.
local function leave(name)
    local kind, life = sub(name, 1, 16), sub(name, 17)
    if life == '' or life_of(kind) ~= life then return end
    if call('HINCRBY', numbers, 'u' .. kind, -1) <= 0 then end_life(kind) end
end

local function set_loose(parts, bytes, name)
    local count = call('ZADD', loose, now_s() + LOOSE_S, parts .. bytes .. name)
    add('loose', count)
    add('bytes', count * tonumber(bytes))
    return count == 1
end

local function unset_loose(one)
    local count = call('ZREM', loose, one)
    add('loose', -count)
    add('bytes', -count * tonumber(sub(one, 21, 36)))
    return count == 1
end

local function give_up(parts)
    given_up[#given_up + 1] = parts
    set_loose(parts, NOTHING, '')
end

local function touch(key)
    local moment = add('moment', 1)
    if call('ZADD', leaves, 'XX', 'CH', moment, key) == 0 then
        call('ZADD', inner, 'XX', moment, key)
    end
end

local function drop(key, row)
    local kind, name, parent = kind_of(row), name_of(row), parent_of(row)
    local used = call('ZSCORE', leaves, key)
    local place = used and leaves or inner
    used = tonumber(used or call('ZSCORE', inner, key))
    call('HDEL', index, key)
    call('ZREM', tree, member_of(key, row))
    call('ZREM', place, key)
    add('bytes', -tonumber(sub(row, 73, 88)))
    if is_live(row) then
        removed[#removed + 1] = kind
        call('HINCRBY', numbers, 'n' .. kind, -1)
        leave(name)
    else
        add('dead', -1)
    end
    give_up(sub(row, 1, 16) .. sub(row, 89, 92))
    local above = call('ZSCORE', inner, parent)
    if above and not first(name .. parent, name .. parent) then
        call('ZREM', inner, parent)
        call('ZADD', leaves, math.max(tonumber(above), used), parent)
    end
end

local function drop_all(key)
    local stack = { key }
    while #stack > 0 and #given_up < DESCENDANTS_MAX do
        local one = table.remove(stack)
        local row = call('HGET', index, one)
        if row then
            local prefix = name_of(row) .. one
            local children = call('ZRANGEBYLEX', tree, '[' .. prefix, '[' .. prefix .. LAST,
                'LIMIT', 0, DESCENDANTS_MAX)
            for _, member in ipairs(children) do stack[#stack + 1] = key_of(member) end
            drop(one, row)
        end
    end
end

local function shared(member, prefix, digests)
    local count, at = 0, #prefix
    while count * 16 < math.min(#member - at - 32, #digests) do
        local from = count * 16
        if sub(member, at + from + 1, at + from + 16) ~= sub(digests, from + 1, from + 16) then
            break
        end
        count = count + 1
    end
    return count
end

-- Whether the parent, a whole chunk of the same kind, is there.
local function is_anchored(name, root, parent, whole)
    if parent == root then return true end
    local row = call('HGET', index, parent)
    return row and name_of(row) == name and #digests_of(row) == whole
end

-- Why a record is not stored: it is there, or a longer one, or its name is taken; or nil.
local function is_held(name, key, parent, digests, row)
    if row and is_live(row) then
        local is_same = name_of(row) .. parent_of(row) .. digests_of(row) == name .. parent .. digests
        if not is_same then return 'other' end
        touch(key)
        return 'held'
    end
    local prefix = name .. parent
    local longer = first(prefix, prefix .. digests)
    if longer and sub(longer, 1, #prefix + #digests) == prefix .. digests then
        touch(key_of(longer))
        return 'held'
    end
end

-- Evicts leaves until so many bytes have room; none that something is being stored behind.
local function make_room(bytes, bytes_max, parents)
    if bytes > bytes_max then return 'no_room' end
    while counts.bytes + bytes > bytes_max do
        if #given_up >= DROPPED_MAX then return 'more' end
        local key
        -- One more than there are parents: if there are so many, one of them is none.
        for _, one in ipairs(call('ZRANGE', leaves, 0, #parents / KEY_BYTES)) do
            if not string.find(parents, one, 1, true) then
                key = one
                break
            end
        end
        if not key then return 'no_room' end
        drop(key, call('HGET', index, key))
    end
end

local ops = {}

-- How much of a chain is there: rows of keys, the key and row of the best match of `digests`, and
-- whether there is more behind.
function ops.find(kind, parent, digests, keys)
    local life = life_of(kind)
    if life == '' then return { {}, '', '', 0 } end
    local name, at, rows, is_all = kind .. life, parent, {}, true
    for from = 1, #keys, KEY_BYTES do
        local key = sub(keys, from, from + KEY_BYTES - 1)
        local row = call('HGET', index, key)
        if not row or name_of(row) .. parent_of(row) ~= name .. at then
            is_all = false
            break
        end
        rows[#rows + 1] = row
        at = key
    end
    local prefix, key, row, is_asked = name .. at, '', '', is_all and digests ~= ''
    local may_go_on = not is_asked and first(prefix, prefix)
    if is_asked then
        local after = first(prefix, prefix .. digests)
        local before = call('ZREVRANGEBYLEX', tree, '(' .. prefix .. digests, '[' .. prefix,
            'LIMIT', 0, 1)[1]
        local best, best_count = nil, 0
        for _, member in pairs({ after or '', before or '' }) do
            local count = shared(member, prefix, digests)
            if count > best_count then best, best_count = member, count end
        end
        if best then
            key = key_of(best)
            row = call('HGET', index, key)
        end
    end
    local deepest = key ~= '' and key or at
    if deepest ~= parent then touch(deepest) end
    return { rows, key, row, may_go_on and 1 or 0 }
end

-- The write id of a record, where it is there just so.
function ops.locate(kind, key, parent, digests)
    local row = call('HGET', index, key)
    if not row or not is_live(row) or kind_of(row) ~= kind then return '' end
    if parent_of(row) .. digests_of(row) ~= parent .. digests then return '' end
    touch(key)
    return sub(row, 1, 16)
end

-- Sets room aside for a record; the life of its kind, or why not. `is_behind`: its parent is being
-- stored, and will be there or not by its end; `parents`: of all that the caller stores.
function ops.begin(kind, whose, root, key, parent, digests, whole, parts, bytes, bytes_max,
    is_behind, parents)
    for _, one in ipairs(call('ZRANGEBYSCORE', loose, '-inf', now_s(), 'LIMIT', 0, 16)) do
        unset_loose(one)
        leave(sub(one, 37))
        give_up(sub(one, 1, 20))
    end
    local before = call('HGET', index, key)
    if before and not is_live(before) then drop_all(key) end
    local name = kind .. life_of(kind)
    local held = is_held(name, key, parent, digests, before)
    if held then return { held, '', 0 } end
    if is_behind == '0' and not is_anchored(name, root, parent, tonumber(whole)) then
        return { 'not_anchored', '', 0 }
    end
    local dropped = #removed
    local why = make_room(tonumber(bytes), tonumber(bytes_max), parents)
    local evicted = #removed - dropped
    if why then return { why, '', evicted } end
    if life_of(kind) == '' then
        lives[kind] = string.format('%08d', add('life', 1))
        call('HSET', numbers, 'i' .. kind, lives[kind], 'n' .. kind, 0, 'k' .. kind, whose)
    end
    if set_loose(parts, bytes, kind .. life_of(kind)) then -- else it has begun before
        call('HINCRBY', numbers, 'u' .. kind, 1)
    end
    return { 'go', life_of(kind), evicted }
end

-- All parts are there: it is a record from now on, in place of the tails that it begins with. The
-- names of parts that are here too are looked for.
function ops.complete(root, key, whole, row, ...)
    local kind, name, parent, digests = kind_of(row), name_of(row), parent_of(row), digests_of(row)
    local parts, bytes = sub(row, 1, 16) .. sub(row, 89, 92), sub(row, 73, 88)
    local is_kept, there = unset_loose(parts .. bytes .. name), call('HGET', index, key)
    local why = not is_kept and 'expired' or not is_live(row) and 'not_anchored'
        or is_held(name, key, parent, digests, there)
    if not why and not is_anchored(name, root, parent, tonumber(whole)) then why = 'not_anchored' end
    if not why and select('#', ...) > 0 and call('EXISTS', ...) < select('#', ...) then
        why = 'no_parts'
    end
    if why then
        -- Also where they were not known any more: they have been sent since.
        if not there or sub(there, 1, 16) ~= sub(row, 1, 16) then give_up(parts) end
        if is_kept then leave(name) end
        return { why }
    end
    call('HSET', index, key, row)
    call('ZADD', tree, 0, member_of(key, row))
    call('ZADD', leaves, add('moment', 1), key)
    add('bytes', tonumber(bytes))
    call('HINCRBY', numbers, 'n' .. kind, 1) -- and needs the life that its store needed
    local above = call('ZSCORE', leaves, parent)
    if above then
        call('ZREM', leaves, parent)
        call('ZADD', inner, above, parent)
    end
    -- Whatever it begins with, it shares as much with its neighbour in the tree.
    local prefix = name .. parent
    local neighbour = call('ZREVRANGEBYLEX', tree, '(' .. member_of(key, row), '[' .. prefix,
        'LIMIT', 0, 1)[1]
    local shared_bytes = neighbour and 16 * shared(neighbour, prefix, digests) or 0
    for length = 16, math.min(shared_bytes, #digests - 16), 16 do
        local start = prefix .. sub(digests, 1, length)
        local shorter = first(start, start)
        if shorter and #shorter == #start + 32 then
            drop(key_of(shorter), call('HGET', index, key_of(shorter)))
        end
    end
    return { 'stored' }
end

-- What `begin` set aside is not wanted any more, whatever of it was sent.
function ops.abandon(parts, bytes, name)
    if unset_loose(parts .. bytes .. name) then leave(name) end
    give_up(parts)
    return {}
end

-- Takes a record away, if it is of this write, and what lies behind it.
function ops.remove(key, write_id)
    local row = call('HGET', index, key)
    if row and sub(row, 1, 16) == write_id then drop_all(key) end
    return {}
end

-- Ends the lives of the kinds that are meant ('*': any); how many records they had.
function ops.clear(fingerprint, salt)
    local all, count = call('HGETALL', numbers), 0
    for at = 1, #all, 2 do
        local field, whose = all[at], all[at + 1]
        if sub(field, 1, 1) == 'k' and #field == 17
            and (fingerprint == '*' or fingerprint == sub(whose, 1, 32))
            and (salt == '*' or salt == sub(whose, 33)) then
            local kind = sub(field, 2)
            local records = tonumber(call('HGET', numbers, 'n' .. kind))
            count = count + records
            add('dead', records)
            end_life(kind)
        end
    end
    return { count }
end

-- Takes away some of the rows whose life is over; the next cursor, '0' at the end.
function ops.sweep(cursor)
    if counts.dead == 0 then return { '0' } end
    local found = call('HSCAN', index, cursor, 'COUNT', DROPPED_MAX)
    for at = 1, #found[2], 2 do
        local row = call('HGET', index, found[2][at])
        if row and not is_live(row) then drop(found[2][at], row) end
    end
    return { found[1] }
end

-- How many records there are; and the numbers of each kind, unless there are too many of them.
function ops.survey()
    local are_few = call('HLEN', numbers) <= #COUNTERS + 4 * KINDS_MAX
    local records = call('HLEN', index) - counts.dead
    return { records, are_few and call('HGETALL', numbers) or {} }
end

for at, value in ipairs(call('HMGET', numbers, unpack(COUNTERS))) do
    counts[COUNTERS[at]] = tonumber(value or 0)
end

-- Keys of the index come and go together; one that is missing was taken away behind our back.
local rows = call('HLEN', index)
local is_whole = rows == call('ZCARD', tree)
    and rows == call('ZCARD', leaves) + call('ZCARD', inner)
    and (rows == 0 or counts.moment > 0)
    and call('ZCARD', loose) == counts.loose
if not is_whole then
    call('UNLINK', unpack(KEYS))
    for _, field in ipairs(COUNTERS) do counts[field] = 0 end
end

for from = 1, #ARGV[2], 20 do unset_loose(sub(ARGV[2], from, from + 19) .. NOTHING) end
local result = ops[ARGV[1]](unpack(ARGV, 3))
if are_counts_changed then
    local written = {}
    for _, field in ipairs(COUNTERS) do
        written[#written + 1] = field
        written[#written + 1] = string.format('%d', counts[field]) -- -0 is no number to a server
    end
    call('HSET', numbers, unpack(written))
end
local head = string.format('%d%016d%04d', is_whole and 1 or 0, counts.bytes, #given_up)
return { head .. table.concat(given_up) .. table.concat(removed), result }

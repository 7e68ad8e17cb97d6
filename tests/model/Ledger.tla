------------------------------- MODULE Ledger -------------------------------
(* Commit, layout, parts, _SUCCESS and reap by two drivers and a reaper.      *)
(* ledger.py says the same in Python, step by step and under the same names.  *)
(* Each action is one request. Whoever stops before it, for ever or for a     *)
(* while, is covered by the order of actions being free.                      *)
EXTENDS Naturals, Sequences, FiniteSets

CONSTANTS Parts,     \* "plain", "content", "deleted" or "fenced": how parts are written
          Layout,    \* TRUE: all finalizers take the layout that is there
          Reap,      \* "commits" or "age": what reap goes by
          Committed, \* TRUE: begin where all shards are committed
          Spoil, Repeat, Stale  \* how often each may happen

Shards == {0, 1}
Drivers == {0, 1}
Nobody == 9
Nothing == [rows |-> <<>>, writer |-> Nobody, sound |-> FALSE]

VARIABLES pieces, commits, layout, parts, success, ended, drivers, reaper, late, budget
vars == <<pieces, commits, layout, parts, success, ended, drivers, reaper, late, budget>>

Idle(step) == [step |-> step, at |-> 0, seen |-> Nothing, record |-> {}]

Init ==
  /\ pieces = IF Committed THEN {<<s, 0>> : s \in Shards} ELSE {}
  /\ commits = [s \in Shards |-> IF Committed THEN 0 ELSE Nobody]
  /\ layout = Nobody
  /\ parts = {}
  /\ success = {}
  /\ ended = FALSE
  /\ drivers = [d \in Drivers |-> Idle(IF Committed THEN "layout" ELSE "piece")]
  /\ reaper = [step |-> "pieces", listed |-> {}]
  /\ late = {}
  /\ budget = [spoil |-> Spoil, repeat |-> Repeat, stale |-> Stale]

-----------------------------------------------------------------------------
(* The result: a part is [name, content]; driver 0 cuts one part of both      *)
(* shards, driver 1 one of each.                                              *)

Whose(d) == IF Layout /\ layout # Nobody THEN layout ELSE d
Cut(d) == IF Whose(d) = 0 THEN << <<0, 1>> >> ELSE << <<0>>, <<1>> >>
Name(d, at) == IF Parts = "content" THEN <<at, d>> ELSE <<at, Nobody>>
Rows(d, at) ==
  LET shards == Cut(d)[at + 1]
  IN [i \in 1..Len(shards) |-> <<shards[i], commits[shards[i]]>>]
There(name) ==
  IF \E p \in parts : p.name = name
  THEN (CHOOSE p \in parts : p.name = name).content ELSE Nothing
Written(there, put) ==
  LET found == {p \in there : p.name = put.name}
      now == IF found = {} THEN Nothing ELSE (CHOOSE p \in found : TRUE).content
      refused == \/ put.kind = "absent" /\ found # {}
                 \/ put.kind = "match" /\ now # put.seen
  IN IF refused THEN there
     ELSE (there \ found) \cup {[name |-> put.name, content |-> put.content]}

Step(d, step) == drivers' = [drivers EXCEPT ![d].step = step]

WritePiece(d) ==
  /\ drivers[d].step = "piece"
  /\ pieces' = pieces \cup {<<drivers[d].at, d>>}
  /\ Step(d, "commit")
  /\ UNCHANGED <<commits, layout, parts, success, ended, reaper, late, budget>>

PutCommit(d) ==
  /\ drivers[d].step = "commit"
  /\ LET s == drivers[d].at IN
       /\ commits' = IF commits[s] = Nobody THEN [commits EXCEPT ![s] = d] ELSE commits
       /\ drivers' = [drivers EXCEPT ![d].step = IF s = 1 THEN "layout" ELSE "piece",
                                     ![d].at = IF s = 1 THEN 0 ELSE s + 1]
  /\ UNCHANGED <<pieces, layout, parts, success, ended, reaper, late, budget>>

PutLayout(d) ==
  /\ drivers[d].step = "layout"
  /\ layout' = IF layout = Nobody THEN d ELSE layout
  /\ Step(d, "look")
  /\ UNCHANGED <<pieces, commits, parts, success, ended, reaper, late, budget>>

Wanted(d, content) ==
  IF Parts \in {"plain", "content"}
  THEN content = [rows |-> Rows(d, drivers[d].at), writer |-> d, sound |-> TRUE]
  ELSE content.sound /\ content.rows = Rows(d, drivers[d].at)

Look(d) ==
  /\ drivers[d].step = "look"
  /\ LET at == drivers[d].at
         name == Name(d, at)
         there == There(name)
         last == at + 1 = Len(Cut(d))
         next == IF there = Nothing \/ Parts \in {"plain", "content"} THEN "put"
                 ELSE IF Parts = "deleted" THEN "delete" ELSE "replace"
     IN IF Wanted(d, there)
        THEN drivers' = [drivers EXCEPT
               ![d].record = @ \cup {[name |-> name, content |-> there]},
               ![d].step = IF last THEN "list" ELSE "look",
               ![d].at = IF last THEN at ELSE at + 1]
        ELSE drivers' = [drivers EXCEPT ![d].step = next, ![d].seen = there]
  /\ UNCHANGED <<pieces, commits, layout, parts, success, ended, reaper, late, budget>>

DeleteBad(d) ==
  /\ drivers[d].step = "delete"
  /\ parts' = {p \in parts : p.name # Name(d, drivers[d].at)}
  /\ drivers' = [drivers EXCEPT ![d].step = "look", ![d].seen = Nothing]
  /\ UNCHANGED <<pieces, commits, layout, success, ended, reaper, late, budget>>

PutPart(d) ==
  /\ drivers[d].step \in {"put", "replace"}
  /\ \/ ended
     \/ \A i \in 1..Len(Cut(d)[drivers[d].at + 1]) :
          LET s == Cut(d)[drivers[d].at + 1][i] IN <<s, commits[s]>> \in pieces
  /\ \E sound \in (IF budget.spoil > 0 THEN {TRUE, FALSE} ELSE {TRUE}),
        again \in (IF budget.repeat > 0 THEN {TRUE, FALSE} ELSE {FALSE}) :
       LET kind == IF Parts \in {"plain", "content"} THEN "always"
                   ELSE IF drivers[d].step = "replace" THEN "match" ELSE "absent"
           put == [name |-> Name(d, drivers[d].at), kind |-> kind,
                   content |-> [rows |-> Rows(d, drivers[d].at), writer |-> d,
                                sound |-> sound],
                   seen |-> IF kind = "match" THEN drivers[d].seen ELSE Nothing]
       IN /\ parts' = Written(parts, put)
          /\ late' = IF again THEN late \cup {put} ELSE late
          /\ budget' = [budget EXCEPT !.spoil = IF sound THEN @ ELSE @ - 1,
                                      !.repeat = IF again THEN @ - 1 ELSE @]
  /\ drivers' = [drivers EXCEPT ![d].step = "look", ![d].seen = Nothing]
  /\ UNCHANGED <<pieces, commits, layout, success, ended, reaper>>

Arrive ==
  /\ \E put \in late :
       /\ parts' = Written(parts, put)
       /\ late' = late \ {put}
  /\ UNCHANGED <<pieces, commits, layout, success, ended, drivers, reaper, budget>>

List(d) ==
  /\ drivers[d].step = "list"
  /\ LET named == drivers[d].record IN
       \/ /\ Parts = "content" /\ named \subseteq parts
          /\ parts' = parts \cap named
          /\ Step(d, "success") /\ UNCHANGED budget
       \/ /\ Parts # "content" /\ parts = named
          /\ Step(d, "success") /\ UNCHANGED <<parts, budget>>
       \/ /\ Parts # "content" /\ named \subseteq parts /\ parts # named
          /\ budget.stale > 0 /\ budget' = [budget EXCEPT !.stale = @ - 1]
          /\ Step(d, "success") /\ UNCHANGED parts
       \/ /\ Parts # "content" /\ parts # named
          /\ drivers' = [drivers EXCEPT ![d] = Idle("layout")]
          /\ UNCHANGED <<parts, budget>>
  /\ UNCHANGED <<pieces, commits, layout, success, ended, reaper, late>>

PutSuccess(d) ==
  /\ drivers[d].step = "success"
  /\ success' = IF ended THEN success ELSE drivers[d].record
  /\ ended' = TRUE
  /\ Step(d, "tidy")
  /\ UNCHANGED <<pieces, commits, layout, parts, reaper, late, budget>>

Proved == ended /\ success \subseteq parts

Tidy(d) ==
  /\ drivers[d].step = "tidy" /\ Proved
  /\ pieces' = {}
  /\ Step(d, "done")
  /\ UNCHANGED <<commits, layout, parts, success, ended, reaper, late, budget>>

-----------------------------------------------------------------------------
ListPieces ==
  /\ reaper.step = "pieces" /\ pieces # {}
  /\ reaper' = [step |-> "commits", listed |-> pieces]
  /\ UNCHANGED <<pieces, commits, layout, parts, success, ended, drivers, late, budget>>

Orphan(piece, shown) ==
  /\ shown[piece[1]] # piece[2]
  /\ Reap = "age" \/ shown[piece[1]] # Nobody

ListCommits ==
  /\ reaper.step = "commits"
  /\ \E lacking \in {Nobody} \cup
         (IF budget.stale > 0 THEN {s \in Shards : commits[s] # Nobody} ELSE {}) :
       LET shown == [s \in Shards |-> IF s = lacking THEN Nobody ELSE commits[s]]
       IN /\ reaper' = [step |-> "delete", listed |->
               IF Proved THEN reaper.listed ELSE {p \in reaper.listed : Orphan(p, shown)}]
          /\ budget' = [budget EXCEPT !.stale = IF lacking = Nobody THEN @ ELSE @ - 1]
  /\ UNCHANGED <<pieces, commits, layout, parts, success, ended, drivers, late>>

Delete ==
  /\ reaper.step = "delete"
  /\ pieces' = pieces \ reaper.listed
  /\ reaper' = [step |-> "pieces", listed |-> {}]
  /\ UNCHANGED <<commits, layout, parts, success, ended, drivers, late, budget>>

Next ==
  \/ \E d \in Drivers :
       \/ WritePiece(d) \/ PutCommit(d) \/ PutLayout(d) \/ Look(d) \/ DeleteBad(d)
       \/ PutPart(d) \/ List(d) \/ PutSuccess(d) \/ Tidy(d)
  \/ Arrive \/ ListPieces \/ ListCommits \/ Delete

Spec == Init /\ [][Next]_vars

-----------------------------------------------------------------------------
Kept == ended \/ \A s \in Shards : commits[s] # Nobody => <<s, commits[s]>> \in pieces
Named == ended => parts = success
Lasting == ended => \/ \A s \in Shards : commits[s] # Nobody => <<s, commits[s]>> \in pieces
                    \/ {p.name : p \in success \ parts} \subseteq {p.name : p \in parts}
Sound == ended => \A p \in parts : p.content.sound
AllRows(files) == UNION {{p.content.rows[i] : i \in 1..Len(p.content.rows)} : p \in files}
Disjoint(files) == \A p, q \in files : p # q => AllRows({p}) \cap AllRows({q}) = {}
Single == ended => parts = success \/ Disjoint(parts)
Whole == ended => /\ AllRows(success) = {<<s, commits[s]>> : s \in Shards}
                  /\ Disjoint(success)
=============================================================================

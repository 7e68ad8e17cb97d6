-------------------------------- MODULE Retry --------------------------------
(* Three retriers of the failed rows 0 and 1: the first two take what is      *)
(* free, the third one row. ledger.py says the same in Python.                *)
EXTENDS Naturals, FiniteSets

CONSTANTS Asked, \* TRUE: each number is asked for, from the first on; else a listing is believed
          Stale  \* how often a listing may lack a plan

Numbers == 0..2
Retriers == 0..2
Rows == {0, 1}
None == {9}

VARIABLES plans, retriers, stale
vars == <<plans, retriers, stale>>

Look == [step |-> "look", number |-> 0, taken |-> {}]
Init == /\ plans = [n \in Numbers |-> None]
        /\ retriers = [r \in Retriers |-> Look]
        /\ stale = Stale

There == {n \in Numbers : plans[n] # None}
Highest(S) == CHOOSE n \in S : \A m \in S : m <= n

Ask(r) ==
  /\ Asked /\ retriers[r].step = "look"
  /\ LET n == retriers[r].number IN
       IF n \in There
       THEN retriers' = [retriers EXCEPT ![r].number = n + 1, ![r].taken = @ \cup plans[n]]
       ELSE retriers' = [retriers EXCEPT ![r].step = "plan"]
  /\ UNCHANGED <<plans, stale>>

Believe(r) ==
  /\ ~Asked /\ retriers[r].step = "look"
  /\ \E lacking \in (IF stale > 0 THEN There ELSE {}) \cup {9} :
       LET seen == There \ {lacking} IN
         /\ retriers' = [retriers EXCEPT ![r] =
              [step |-> "plan", taken |-> UNION {plans[n] : n \in seen},
               number |-> IF seen = {} THEN 0 ELSE Highest(seen) + 1]]
         /\ stale' = IF lacking = 9 THEN stale ELSE stale - 1
  /\ UNCHANGED plans

PutPlan(r) ==
  /\ retriers[r].step = "plan" /\ retriers[r].number \in Numbers
  /\ LET n == retriers[r].number
         free == Rows \ retriers[r].taken
         wanted == IF r = 2 /\ free # {} THEN {CHOOSE x \in free : \A y \in free : x <= y}
                   ELSE free
     IN /\ free # {}
        /\ IF plans[n] = None
           THEN /\ plans' = [plans EXCEPT ![n] = wanted]
                /\ retriers' = [retriers EXCEPT ![r] =
                     [step |-> "done", number |-> 0, taken |-> {}]]
           ELSE /\ retriers' = [retriers EXCEPT ![r] = Look]
                /\ UNCHANGED plans
  /\ UNCHANGED stale

Next == \E r \in Retriers : Ask(r) \/ Believe(r) \/ PutPlan(r)
Spec == Init /\ [][Next]_vars

Once == \A n, m \in There : n # m => plans[n] \cap plans[m] = {}
=============================================================================

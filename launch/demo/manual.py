"""The long text shared by both questions of the demo: the manual of an imaginary clock."""

MANUAL = """\
OPERATING MANUAL OF THE HALDENBRIDGE TIDE CLOCK

1. What the clock is

The Haldenbridge tide clock stands in the small square between the fish market and the old customs house. It shows the
hour, the day of the month and the height of the water in the harbour. It was built by the clockmaker Ines Varga, who
finished it after six years of work. The townspeople paid for it with a tax on salted herring. The clock has three
dials. The upper dial is white and shows the hour. The middle dial is blue and shows the tide. The lower dial is green
and shows the day of the month. A bronze heron stands on the roof. At high water it opens its wings, and at low water
it folds them again.

2. How it is driven

The hour hand is driven by a weight of forty kilograms that hangs on a chain inside the tower. The weight sinks by one
metre in a day, and the tower is nine metres high, so the clock must be wound at least once in eight days. The tide
hand is not driven by the weight. A copper float lies in a shaft that is connected with the harbour by a pipe. When the
water rises, the float rises, and a thin steel wire turns the tide hand. The wire runs over two wheels of boxwood. The
wheels must never be oiled, because oil makes the wood swell and the wire slip.

3. The keeper

The town appoints one keeper, who holds the only key to the tower. The keeper winds the clock every Monday and every
Friday before nine in the morning. He or she writes the date, the temperature in the tower and the height of the water
into a red book. When the book is full, it is given to the town library, and a new one is begun. If the keeper is ill,
the harbour master takes the key and does the winding. Nobody else may open the tower, with one exception: on the first
Sunday in June the tower is open to all children of the town, who may turn the crank once each.

4. Winding

Open the small door on the north side. Hang the lamp on the hook to the left of the stairs. Climb to the second landing
and lift the iron bar that locks the crank. Turn the crank slowly to the right, thirty-two full turns. Stop when the
red mark on the chain reaches the brass ring. Do not turn further: the chain can jump off its wheel and the weight
would fall. Lower the iron bar, and check that it lies in its notch. Then wait on the landing for one full minute and
listen. A healthy clock ticks evenly. If one tick is longer than the next, the tower has settled and the clock must be
levelled, see section 6.

5. Winter

Frost is the worst enemy of the clock. When the temperature in the tower falls below four degrees, the keeper lights
the small stove on the ground floor and keeps it burning until the next morning. The stove is fed with peat, never with
coal, because the smoke of coal blackens the dials. When the harbour freezes, the float may be caught in the ice of the
shaft. In that case unhook the steel wire from the float and tie it to the iron nail beside the shaft. The tide hand
then rests at zero. Hang the yellow flag from the window of the tower, so that the fishermen know that the tide dial
does not tell the truth. When the ice has melted, hook the wire back, take the flag in, and write the number of days
into the red book.

6. Levelling

The clock stands on three feet. Each foot has a screw with a square head. Only the foot on the east side may be turned.
A quarter of a turn is enough in most years. After each quarter turn wait for ten minutes and listen again. If the
ticking is not even after four quarter turns, send for the clockmaker. The address of the workshop is written inside
the door.

7. The heron

The heron is moved by its own small weight of three kilograms, which the tide wire releases. Its wings are of thin
bronze and bend easily. Twice a year, in March and in October, brush the dust from the joints with a dry brush of goat
hair. If a gull builds a nest between the wings, leave it there until the young have flown, and tie the heron so that
the wings stay folded. The town council decided this by a large majority.

8. What to do when the clock stops

First look whether the weight lies on the floor. If it does, the clock was not wound: wind it and set the hour. If the
weight hangs free, look at the iron bar. If the bar is not in its notch, the crank has turned back and holds the wheel:
turn the crank to the right until the bar falls into place. If the bar is in its notch, do not try anything else. Hang
the white flag from the window and send for the clockmaker. To set the hour, open the glass of the upper dial and push
the long hand forward, never backward. Let the bell strike at each hour before you go on.
"""

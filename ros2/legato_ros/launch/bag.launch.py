"""A bag played by its own clock, and the node: `ros2 launch legato_ros bag.launch.py bag:=BAG`."""

from pathlib import Path

from ament_index_python.packages import get_package_share_directory
from launch import LaunchDescription
from launch.actions import DeclareLaunchArgument, ExecuteProcess, IncludeLaunchDescription
from launch.launch_description_sources import PythonLaunchDescriptionSource
from launch.substitutions import LaunchConfiguration

FOLDER = Path(get_package_share_directory("legato_ros"))


def generate_launch_description() -> LaunchDescription:
    return LaunchDescription(
        [
            DeclareLaunchArgument("bag", description="bag to play"),
            DeclareLaunchArgument("rate", default_value="1.0", description="speed of the bag"),
            DeclareLaunchArgument("params", default_value=str(FOLDER / "config" / "legato.yaml")),
            IncludeLaunchDescription(
                PythonLaunchDescriptionSource(str(FOLDER / "launch" / "legato.launch.py")),
                launch_arguments={
                    "params": LaunchConfiguration("params"),
                    "use_sim_time": "true",
                }.items(),
            ),
            ExecuteProcess(
                cmd=[
                    *("ros2", "bag", "play", LaunchConfiguration("bag")),
                    *("--clock", "100", "--rate", LaunchConfiguration("rate")),
                ],
                output="screen",
            ),
        ]
    )
